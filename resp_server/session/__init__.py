"""The state of one connection: its user, transaction, subscriptions, tracking, and the epochs that it has seen.

No I/O. The connection's bytes and turns are in `client`; pushes are in `push`.
"""
