"""The Redis protocol as values: bytes to requests, replies to bytes, errors, patterns, doubles, DUMP's format.

Pure: no asyncio, no socket, no command. What a connection remembers between requests is in `session`.
"""
