"""From requests to replies: the context of commands, the dispatcher, EXEC and WATCH, long requests in portions.

The commands themselves are in `commands`; `client` reads and writes the connection's bytes.
"""
