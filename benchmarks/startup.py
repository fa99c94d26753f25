"""The time from the start of a server's process to its first correct reply: from a store, a snapshot or the full log.

The peer is redis-server, which loads its own file of the same keys. All files are in the page cache.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from benchmarks.options import Options
from benchmarks.results import Row, compared_row
from benchmarks.servers import (
    JOB,
    BenchmarkError,
    RedisServer,
    ServerProcess,
    key,
    load_log,
    start_redis,
    start_sparkis,
    temporary_folder,
    value,
)
from compat.waiting import eventually
from resp_server.net.client import Client, ClientError
from state_backend.apply.compact import compact_log

KEYS = 1_000_000
TIMEOUT_S = 300.0

Start = Callable[[], ServerProcess]


def run(options: Options) -> Iterator[Row]:
    """Yield a row for each kind of start."""
    keys = max(1000, int(KEYS * options.scale))
    with temporary_folder() as folder:
        options.report(f"startup: writing {keys:,} keys")
        log, short_log, store = folder / "log", folder / "short-log", folder / "store"
        load_log(log, keys, has_maps_and_lists=False).close()
        shutil.copytree(log, short_log)
        compact_log(str(short_log), JOB, retention_ms=0)
        _timed(lambda: start_sparkis(log, store), keys)  # makes the store
        _save_redis(folder, keys)
        starts: dict[str, Start] = {
            "from store": lambda: start_sparkis(log, store),
            "from snapshot": lambda: start_sparkis(short_log, _emptied(folder / "new")),
            "from log": lambda: start_sparkis(log, _emptied(folder / "new")),
        }
        for name, start in starts.items():
            pairs = []
            for number in range(options.rounds):
                options.report(f"startup: {name}, round {number + 1} of {options.rounds}")
                pairs.append((_timed(start, keys), _timed(lambda: start_redis(folder), keys)))
            yield compared_row(
                f"start {name}", "startup", pairs, unit="s", better="less",
                peer_name="redis-server from RDB", note=f"{keys:,} keys",
            )  # fmt: skip


def _save_redis(folder: Path, keys: int) -> None:
    server = RedisServer(keys, folder, has_maps_and_lists=False)
    with Client("127.0.0.1", server.port, timeout_s=TIMEOUT_S) as client:
        client.call("SAVE")
    server.stop()


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def _timed(start: Start, keys: int) -> float:
    """Start a server, poll it until a correct reply, stop it; return the seconds from the start to that reply."""
    number = keys // 2
    started_s = time.perf_counter()
    process, port, _ = start()

    def is_right() -> bool:
        with suppress(ClientError), Client("127.0.0.1", port) as client:  # LOADING is an error
            return bool(client.call("GET", key(number)) == value(number, 0))
        return False

    try:
        eventually(
            is_right, awaited="the first correct reply", timeout_s=TIMEOUT_S, interval_s=0.002, error=BenchmarkError
        )
        return time.perf_counter() - started_s
    finally:
        process.terminate()
        process.wait(60)
