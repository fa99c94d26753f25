"""From requests to replies: the context of commands, the dispatcher, EXEC and WATCH, long requests in chunks.

The commands themselves are in `commands`; `client` reads and writes the connection's bytes.
"""
