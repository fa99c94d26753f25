"""The only package that imports pyspark: the sink, attachments, servers that a driver starts, the command line.

`cli` -> `demo` -> `queryable` -> `real_time` -> `attach` -> `publish` -> `serving` -> `checkpoint` -> `sessions`,
`command_process`: each folder or module imports only from those to its right (docs/design/0007-layers.md).
"""

from importlib import import_module

import resp_server
import state_backend

# The distribution of this package. `sparkis.packages` checks it: other distributions may have a package of this name.
DISTRIBUTION = "sparkis"

# Spark's Python workers import this package, and not `sparkis`.
if any(getattr(package, "DISTRIBUTION", None) != DISTRIBUTION for package in (state_backend, resp_server)):
    import_module("sparkis")  # raises PackageClashError, which names the distribution that overwrote a package
