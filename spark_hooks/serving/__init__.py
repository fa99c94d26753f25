"""Servers that a driver starts, beside itself or beside executors, and the endpoints to which sinks announce epochs.

Nothing here knows rows or queries (`publish`, `attach`); the servers themselves are in `resp_server`.
"""
