"""Ten million keys: GET at every pipeline depth beside redis-server, and the last point of the scaling curves."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import scaling
from benchmarks.options import Options
from benchmarks.reads import PIPELINES, measured, uniform
from benchmarks.results import Row
from benchmarks.servers import both

KEYS = 10_000_000


def run(options: Options) -> Iterator[Row]:
    """Yield a row per pipeline depth, and the points of the curves."""
    keys = max(1000, int(KEYS * min(1.0, options.scale)))
    options.report(f"many: loading {keys:,} keys into both servers")
    with both(keys, has_maps_and_lists=False) as servers:
        for pipeline in PIPELINES:
            name = f"GET uniform of 10 M keys, pipeline {pipeline}"
            yield measured(name, servers, uniform(keys), pipeline, options, note=f"{keys:,} keys")
        yield from scaling.points(servers, keys, options)
