"""The only package that imports pyspark: the sink, attachments, servers that a driver starts, the command line.

`cli` -> `attach`, `demo` -> `publish` -> `serving` -> `checkpoint`, `sessions`, `own_spark`: each folder or module
imports only from those to its right (docs/design/0007-layers.md).
"""

# The distribution of this package. `sparkis.packages` checks it: other distributions may have a package of this name.
DISTRIBUTION = "sparkis"
