"""Servers that a driver starts, beside itself or beside executors, and the endpoints through which sinks notify them.

Rows and queries are not here (`publish`, `attach`); the servers themselves are in `resp_server`.
"""
