"""Pushes to clients: pub/sub messages, keyspace notifications, invalidations, MONITOR lines.

The subscriptions and tracking options of one connection are in `session`; a proxy's relay of messages is in
`backends.servers`.
"""
