"""From the log into a store, and back: the applier, the loading of slots, snapshots, compaction, renaming, replay.

The programs of this package are here; a server starts them. The interface for readers is in `store`.
"""
