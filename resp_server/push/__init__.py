"""What clients are sent without asking: messages, keyspace notifications, invalidations, MONITOR.

What one connection subscribed to or tracks is in `session`; a proxy's connections for messages are in `proxy`.
"""
