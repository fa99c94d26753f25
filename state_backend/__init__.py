"""State as bytes: descriptors, the change log, stores, Spark's state files. Knows neither Redis replies nor Spark.

`history` -> `apply`, `attach` -> `lmdb`, `checkpoint` -> `store`, `log` -> `codec` -> `model` -> `native`: each folder
imports only from those to its right (docs/design/0007-layers.md).
"""

# The distribution of this package. `sparkis.packages` checks it: other distributions may have a package of this name.
DISTRIBUTION = "sparkis"

# The version of all packages; here, because a server reports it and does not import `sparkis`.
VERSION = "0.1.0"
