"""Reads a query's checkpoint without Spark: its states, whole states, and the changes of a batch.

It knows the files of Spark 3.5 to 4.3 (docs/spark-state-files.md), and reads them through `log.filesystems`. It writes
nothing, and knows not the change log. Of Redis it knows the keys and the types as which an attachment serves a state
(`keys.py`).
"""
