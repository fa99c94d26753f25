"""Servers that a driver starts: beside itself or beside executors, and where sinks find them.

Nothing of rows or queries; what the servers do is in `resp_server`.
"""
