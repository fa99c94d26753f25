"""State servers over an upstream: each key is answered by its owner.

`overlay_backend` answers requests by the backends of their keys, `keyspace` those about all keys by both, `shadow`
compares both.
"""
