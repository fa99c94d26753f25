"""The parts of the build that pyproject.toml cannot describe: the compiled core, and the links of the readme.

The core is optional: without it the same program runs in Python. In a checkout the load generator of the benchmarks is
compiled with it; it is not shipped.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Only for little-endian machines (see `state_backend/native/lookup.pyx`). Only Linux has epoll.
MODULES = [
    "state_backend.native.lookup",
    "state_backend.native.packing",
    "state_backend.native.state_files",
    "state_backend.native.change_records",
    "resp_server.native.client_fields",
    "resp_server.native.rows",
    "resp_server.native.permissions",
    "resp_server.native.encoding",
    "resp_server.native.jobs",
    "resp_server.native.lookup_batch",
    "resp_server.native.core",
    "resp_server.native.keyless_commands",
    "resp_server.native.fast_path",
    "resp_server.native.pipelines",
    "resp_server.backends.servers.native.key_owners",
    "resp_server.backends.servers.native.client_batch",
    "resp_server.backends.servers.native.reply_delivery",
    "resp_server.backends.servers.native.pipeline_batch",
    "resp_server.backends.servers.native.forwarded_commands",
    "resp_server.backends.servers.native.upstream_access",
    "resp_server.backends.servers.native.stored_reads",
    "resp_server.backends.servers.native.forwardable_requests",
    "resp_server.backends.servers.native.forwarder",
    "resp_server.backends.servers.native.client_forwarder",
]
if sys.platform == "linux":
    MODULES.append("resp_server.native.sockets")
    if "--inplace" in sys.argv and os.path.exists("benchmarks/native/load.pyx"):
        MODULES.append("benchmarks.native.load")

# Without debug symbols, compiling takes a quarter less time, and a module has a fifth of the size. These flags come
# after CFLAGS on the command line, so with CFLAGS in the environment (`make fuzz-native`) the first two are left out.
FLAGS = ["-Wno-unused"] if "CFLAGS" in os.environ else ["-O2", "-g0", "-Wno-unused"]
# A product and a sum are rounded separately on all machines, as Redis and Python do.
FLAGS.append("-ffp-contract=off")
# No code pickles these classes, or needs the names and signatures of their methods.
DIRECTIVES = {"language_level": 3, "auto_pickle": False, "binding": False}


def extensions() -> list[Extension]:
    """Return the compiled modules; none without Cython, on big-endian machines, and if SPARKIS_PURE is set."""
    if os.environ.get("SPARKIS_PURE") or sys.byteorder != "little":
        return []
    try:
        from Cython.Build import cythonize
    except ImportError:
        return []
    made = [
        Extension(name, [name.replace(".", "/") + ".pyx"], extra_compile_args=FLAGS, optional=True) for name in MODULES
    ]
    return list(cythonize(made, compiler_directives=DIRECTIVES, include_path=["."], build_dir="build"))


def readme() -> str:
    """Return README.md with links that work on PyPI: to the repository, as of the tag of this version."""
    here = Path(__file__).parent
    repository = tomllib.loads((here / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    version = re.search(r'^VERSION = "(.*)"', (here / "state_backend" / "__init__.py").read_text(), re.MULTILINE)
    assert version is not None
    images, links = re.compile(r"(!\[[^]]*\]\()(?!https?:)"), re.compile(r"(?<=\]\()(?!https?:|#)")
    text = images.sub(rf"\1{repository}/raw/v{version[1]}/", (here / "README.md").read_text())
    return links.sub(f"{repository}/blob/v{version[1]}/", text)


class BuildModules(build_ext):
    """Builds the modules that can be built. A missing compiler, or missing headers, do not prevent the installation."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        # `optional` is not enough: setuptools 84 raises an exception that it does not handle itself.
        except Exception as error:
            self.warn(f"{ext.name} is left out: {error}")


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildModules},
    long_description=readme(),
    long_description_content_type="text/markdown",
    options={"build_ext": {"parallel": os.cpu_count()}},
)
