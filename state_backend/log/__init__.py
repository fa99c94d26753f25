"""The change log of a job: its files on any filesystem, its readers, its one writer, and the removal of old files.

Nothing here needs a store. Code that needs both a log and a store (snapshots, `sparkis rename`) is in `apply`.
"""
