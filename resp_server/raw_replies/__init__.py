"""Replies that are forwarded as undecoded bytes: they are split, merged, and passed on to clients.

Used for the state servers behind a proxy (`backends.servers`) and for a team's own Redis (`backends.redis`). No
sockets are opened here.
"""
