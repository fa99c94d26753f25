"""GET of one million keys, and with --full of ten million, at every pipeline depth, beside redis-server.

Yields the curves' points for these numbers of keys, too.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import scaling
from benchmarks.options import Options
from benchmarks.reads import PIPELINES, measured, uniform
from benchmarks.results import Row
from benchmarks.servers import both

MILLIONS, MILLIONS_IF_FULL = (1,), (10,)


def run(options: Options) -> Iterator[Row]:
    """Yield a row for each number of keys and pipeline depth, and the points of the curves."""
    for millions in (*MILLIONS, *(MILLIONS_IF_FULL if options.is_full else ())):
        keys = max(1000, int(millions * 1_000_000 * min(1.0, options.scale)))
        options.report(f"many: loading {keys:,} keys into both servers")
        with both(keys, has_maps_and_lists=False) as servers:
            for pipeline in PIPELINES:
                name = f"GET uniform of {millions} M keys, pipeline {pipeline}"
                yield measured(name, servers, uniform(keys), pipeline, options, note=f"{keys:,} keys")
            yield from scaling.points(servers, keys, options)
