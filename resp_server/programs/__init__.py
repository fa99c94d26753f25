"""The programs: one module each, with its command line options and its main loop.

The servers that they run are in `serving`, `proxy`, `registry` and `workers`.
"""
