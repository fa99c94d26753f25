"""The interface of a store, all jobs of a server as one keyspace, and the slots that a store owns.

The memory store is here; tests compare the store in `lmdb` with it. Nothing here knows a log: `apply` brings epochs.
"""
