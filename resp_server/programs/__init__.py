"""The programs: one module each, with its command line options and its main loop.

The servers that they run are in `serving`, `backends`, `registry` and `workers`.
"""

from importlib import import_module

import resp_server

if getattr(resp_server, "DISTRIBUTION", None) != "sparkis":
    import_module("sparkis")  # raises PackageClashError, which names the distribution that overwrote `resp_server`
