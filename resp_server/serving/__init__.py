"""A server as a whole: its listeners and clock, the jobs that it serves, its appliers, its control ports.

One connection is in `client`; options, signals and exit codes are in `programs`.
"""
