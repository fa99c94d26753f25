"""Reads a query's checkpoint without Spark: its states, whole states, and the changes of a batch.

It knows the files of Spark 3.5 to 4.3 (docs/spark-state-files.md), and reads them through `log.filesystems`. It writes
nothing, and knows neither Redis nor the change log.
"""
