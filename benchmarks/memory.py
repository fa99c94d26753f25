"""Memory and disk per key beside redis-server's used_memory: after 100 epochs that change 1 % of the keys each and one
that rewrites all, while clients read.

LMDB copies every page that it changes. So memory is measured after many epochs, as in a running job, not after loading.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from benchmarks import processes, resting_jobs, small_cluster
from benchmarks.options import Options
from benchmarks.reads import uniform
from benchmarks.results import Row, compared_row, single_row
from benchmarks.servers import JOB, BenchmarkError, RedisServer, ServerUnderTest, Sparkis, both
from compat.waiting import eventually
from state_backend.apply.applier import IDLE_AFTER_S
from state_backend.apply.store_copies import COMPACT_IDLE_ABOVE_BYTES, COMPACT_IDLE_SHARE, COMPACT_PAUSE_S
from state_backend.lmdb.store import LmdbStore
from state_backend.log.filesystems.filesystem import Filesystem

KEYS = 1_000_000
EPOCHS = 100
READERS = 4
BUDGET = 1.5
POLL_INTERVAL_S = 0.5
COMPACT_TIMEOUT_S = COMPACT_PAUSE_S + 60.0


def run(options: Options) -> Iterator[Row]:
    """Yield the memory and disk per key, the memory of the processes, and that of many small jobs."""
    keys = max(1000, int(KEYS * options.scale))
    with both(keys, has_maps_and_lists=False) as (ours, peer):
        for server in (ours, peer):
            with _readers(server):
                _live(server, options)
                if isinstance(server, Sparkis):
                    wait_until_at_rest(server)
                    found = Footprint.measure(server, peer)
        yield from found.rows(keys, RedisFootprint.measure(peer))
    yield from resting_jobs.rows(options)
    yield from small_cluster.rows(options)


@contextmanager
def _readers(server: ServerUnderTest) -> Iterator[None]:
    """Run clients that read without a pause, each with one request at a time."""
    words = uniform(server.keys).words
    command = ["redis-benchmark", "-p", str(server.port), "-c", str(READERS), "-l", "-q", "-n", "100000"]
    command += ["-r", str(server.keys), *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _live(server: ServerUnderTest, options: Options) -> None:
    """Publish the epochs one by one, then the rewrite."""
    random = np.random.default_rng(3)
    for number in range(EPOCHS):
        options.report(f"memory: {server.name}, epoch {number + 1} of {EPOCHS}")
        server.change(np.unique(random.integers(0, server.keys, max(1, server.keys // 100))))
        server.settle()
    options.report(f"memory: {server.name}, rewriting every key")
    server.change(np.arange(server.keys, dtype=np.int64))
    server.settle()


def wait_until_at_rest(server: Sparkis) -> None:
    """Wait until the job is idle, and clients read a store with hardly any free pages."""

    def is_compact() -> bool:
        folders = [path for path in (server.store / JOB).iterdir() if path.is_dir()]
        if len(folders) != 1:
            return False
        store = LmdbStore(folders[0], "", is_reader=True)
        used, free = store.used_bytes()
        store.close()
        return free < max(used // COMPACT_IDLE_SHARE, COMPACT_IDLE_ABOVE_BYTES)

    time.sleep(IDLE_AFTER_S + Filesystem.probe_interval_s_max)
    eventually(
        is_compact,
        awaited="a copy of the store without its free pages",
        timeout_s=COMPACT_TIMEOUT_S,
        interval_s=POLL_INTERVAL_S,
        error=BenchmarkError,
    )


class Footprint:
    """Our server's files, and the memory of its processes."""

    def __init__(self, file_bytes: int, log_bytes: int, serving: list[processes.Memory], applier: processes.Memory):
        self.file_bytes = file_bytes
        self.log_bytes = log_bytes
        self.serving = serving
        self.applier = applier

    @classmethod
    def measure(cls, server: Sparkis, _: RedisServer | None = None) -> Footprint:
        """Measure a server."""
        return cls(
            processes.disk_bytes(server.store),
            processes.disk_bytes(server.log),
            [processes.memory(pid) for pid in server.pids()],
            processes.memory(server.applier_pid()),
        )

    @property
    def all_bytes(self) -> int:
        """The size of the file, and the heaps of all processes."""
        return self.file_bytes + sum(each.anonymous_bytes for each in (*self.serving, self.applier))

    @property
    def proportional_bytes(self) -> int:
        """The memory of the processes; a page of a file is divided among the processes that map it."""
        return sum(each.proportional_bytes for each in (*self.serving, self.applier))

    def rows(self, keys: int, peer: RedisFootprint) -> Iterator[Row]:
        """Yield the rows."""
        note = f"{keys:,} keys"

        def beside(name: str, ours: int, theirs: int, budget: float | None, peer_name: str) -> Row:
            pair = [(ours / keys, theirs / keys)]
            return compared_row(
                name, "memory", pair, unit="bytes/key", better="less", budget=budget, peer_name=peer_name, note=note
            )

        used = "redis-server's used_memory"
        yield beside("store file", self.file_bytes, peer.used_bytes, BUDGET, used)
        yield beside("store file and processes", self.all_bytes, peer.used_bytes, BUDGET, used)
        resident = "redis-server's resident memory"
        yield beside("resident, shared pages once", self.proportional_bytes, peer.resident_bytes, None, resident)
        sizes = {
            "serving process, heap": sum(each.anonymous_bytes for each in self.serving),
            "serving process, of files": sum(each.mapped_bytes for each in self.serving),
            "applier, heap": self.applier.anonymous_bytes,
            "applier, of files": self.applier.mapped_bytes,
            "change log on the disk": self.log_bytes,
        }
        for name, size in sizes.items():
            yield single_row(name, "memory", [size / (1 << 20)], unit="MiB")


class RedisFootprint:
    """redis-server's memory: its used_memory, and the system's count."""

    def __init__(self, used_bytes: int, resident_bytes: int) -> None:
        self.used_bytes = used_bytes
        self.resident_bytes = resident_bytes

    @classmethod
    def measure(cls, server: RedisServer) -> RedisFootprint:
        """Measure a server."""
        return cls(server.used_memory(), processes.memory(server.process.pid).proportional_bytes)
