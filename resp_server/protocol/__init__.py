"""The Redis protocol as values: bytes to requests, replies to bytes, errors, patterns, doubles, DUMP's format.

Pure: no asyncio, no sockets, no commands. The state of a connection between requests is in `session`.
"""
