"""What readers see: the interface of a store, the jobs of a server as one keyspace, and its slots.

The memory store is here, as the oracle of the one in `lmdb`. Knows no log: `apply` brings epochs.
"""
