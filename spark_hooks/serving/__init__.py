"""Servers that a driver starts, beside itself or executors, and the endpoints through which sinks announce epochs.

Rows and queries are not here (`publish`, `attach`); the servers themselves are in `resp_server`.
"""
