"""One client's connection: its bytes, its turns, and what waits to be sent.

A `pipeline` answers the requests; the compiled sockets are in `native`.
"""
