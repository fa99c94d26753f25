"""Real programs, unchanged, at a redis-server alone and through a proxy with that Redis as its upstream.

`make programs` installs locked versions of the programs into environments of their own, runs each at both addresses,
compares what its checks found, and writes the tables of docs/swap-programs.md.
"""
