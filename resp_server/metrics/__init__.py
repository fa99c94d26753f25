"""The counters and timings of a process, for INFO, SLOWLOG and LATENCY; no I/O.

The commands that render them are in `commands`; the permission to read them is in `acl`.
"""
