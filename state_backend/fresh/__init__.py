"""Values that are not committed yet: rows of a query in Real-Time Mode, which readers see before their epoch.

They stand beside a job's store, which does not know of them. Only `values` is used outside of this folder.
"""
