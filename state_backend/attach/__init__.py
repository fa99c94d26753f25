"""Attachments: they follow a query's checkpoint and write its state into a change log, without Spark.

`attachment` follows the batches. A reader reads their rows: `files_reader` from Spark's own files; another one, in
`spark_hooks.attach`, by jobs of Spark. Both write the same records.
"""
