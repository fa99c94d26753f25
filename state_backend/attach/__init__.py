"""Attachments: they follow a query's checkpoint and write its state into a change log, without Spark.

`attachment` follows the batches. A reader reads their rows: `files_reader` reads Spark's own files; the reader
in `spark_hooks.attach` runs Spark jobs. Both write the same records.
"""
