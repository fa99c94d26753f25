"""State as bytes: descriptors, the change log, stores. Knows neither Redis replies nor Spark.

`apply` -> `lmdb` -> `store`, `log` -> `codec` -> `model`: who may import whom (docs/design/0007-rooms.md).
"""

# What `sparkis.packages` knows this package by: PyPI has others of such names.
DISTRIBUTION = "sparkis"
