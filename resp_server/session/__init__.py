"""What a server knows of one connection: its user, transaction, subscriptions, what it tracks, which epochs it saw.

Values alone. The connection's bytes and turns are in `client`, what it is sent without asking in `push`.
"""
