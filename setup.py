"""What pyproject.toml cannot say: the compiled core. It is optional: without it the same program runs in Python.

In a checkout the load generator of the benchmarks is compiled with it; it is not shipped.
"""

from __future__ import annotations

import os
import sys

from setuptools import Extension, setup

# Little-endian machines alone (see `state_backend/native/lookup.pyx`); epoll is Linux'.
MODULES = [
    "state_backend.native.lookup",
    "state_backend.native.packing",
    "resp_server.native.core",
    "resp_server.native.hop",
]
if sys.platform == "linux":
    MODULES.append("resp_server.native.sockets")
    if "--inplace" in sys.argv and os.path.exists("benchmarks/native/load.pyx"):
        MODULES.append("benchmarks.native.load")


def extensions() -> list[Extension]:
    """Return the compiled modules; none where there is no Cython, or SPARKIS_PURE is set."""
    if os.environ.get("SPARKIS_PURE") or sys.byteorder != "little":
        return []
    try:
        from Cython.Build import cythonize
    except ImportError:
        return []
    made = [
        Extension(name, [name.replace(".", "/") + ".pyx"], extra_compile_args=["-O2", "-Wno-unused"], optional=True)
        for name in MODULES
    ]
    return list(cythonize(made, language_level=3, include_path=["."], build_dir="build"))


setup(ext_modules=extensions())
