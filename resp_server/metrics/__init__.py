"""What a process counts and times, for INFO, SLOWLOG and LATENCY: pure numbers.

How they are shown is in `commands`, who may see them in `acl`.
"""
