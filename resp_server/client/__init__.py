"""One client's connection: its bytes, its turns, and what waits to be sent.

Requests are executed in `execution`; the compiled sockets are in `native`.
"""
