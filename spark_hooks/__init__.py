"""Spark's side: the sink, serving from a driver, the command line. The only package that imports pyspark.

Each room imports only from rooms to its right: `cli`, `attach` and `demo`, `publish`, `serving`, `checkpoint`,
`sessions` and `signals` (docs/design/0007-rooms.md).
"""

# Read by `sparkis.packages`, which checks that this package belongs to sparkis: PyPI has packages of similar names.
DISTRIBUTION = "sparkis"
