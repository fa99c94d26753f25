"""From the log into a store, and back: the applier, slots that are gained, snapshots, compaction, renaming, replay.

The processes of this package are here; a server starts them. What readers see is in `store`.
"""
