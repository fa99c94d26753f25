"""Spark's side: the sink, serving from a driver, the command line. The only package that imports pyspark.

`cli`, `demo` -> `attach` -> `publish` -> `serving` -> `checkpoint` -> `sessions`, `signals`: who may import whom
(docs/design/0007-rooms.md).
"""

# What `sparkis.packages` knows this package by: PyPI has others of such names.
DISTRIBUTION = "sparkis"
