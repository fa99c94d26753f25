"""The programs: one module for each, from its options to its end.

What they start is elsewhere: `serving`, `proxy`, `registry`, `workers`.
"""
