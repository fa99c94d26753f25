"""`sparkis attach` without Spark: the delay from a commit to a client's read, whole states, and the rate of decoding.

The checkpoints are made without Spark (`checkpoints`): an aggregation with three values, in the HDFS-backed provider.
So nothing else takes processor time. `attach` measures the same beside a query.

    delay        a million keys; some of them change in each batch; commits at a fixed interval. A client polls the key
                 that all batches change; the epoch's file has the time of its commit
    whole        from the start of `sparkis attach` until the whole state is in the log; with the processor time of all
                 of its processes, and the most memory that one of them took
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from benchmarks.checkpoints import WrittenCheckpoint, key_of
from benchmarks.delay import percentile_row
from benchmarks.options import Options
from benchmarks.results import Row, single_row
from benchmarks.servers import BenchmarkError, temporary_folder
from compat.waiting import eventually
from resp_server.net import children
from resp_server.net.client import Client
from state_backend.attach.change_writer import ChangeWriter
from state_backend.attach.start import bind
from state_backend.checkpoint.checkpoint import Checkpoint
from state_backend.codec.row_encoding import SkippedRows

PART = "state_files"
JOB, STATE = "attached", "aggregation"
PARTITIONS = 16
KEYS = 1_000_000
MANY_KEYS = 10_000_000
ENCODED = 200_000
WARM_UP_BATCHES = 3
TIMEOUT_S = 300.0
POLL_PAUSE_S = 0.001
# The time from the last task of a batch to its commit (measured by `attach`: 13 to 38 ms).
COMMITTED_AFTER_S = 0.015
COMMAND = (sys.executable, "-m", "sparkis", "attach", "--job", JOB)


@dataclass(frozen=True)
class Case:
    """A number of changes per batch, the number of batches, the time between two, and the budget of the delay."""

    changes: int
    batches: int
    interval_s: float
    budget_p50_ms: float | None = None


CASES = (
    Case(1_000, batches=40, interval_s=0.15),
    Case(20_000, batches=40, interval_s=0.25, budget_p50_ms=100.0),
    Case(200_000, batches=10, interval_s=2.0, budget_p50_ms=1_000.0),
)


def run(options: Options) -> Iterator[Row]:
    """Yield the rows of the delay, of whole states, and of decoding."""
    keys = max(1_000, int(KEYS * options.scale))
    with temporary_folder() as folder:
        for case in CASES:
            options.report(f"state files: {case.changes:,} changes")
            yield from _delay(folder / f"delay{case.changes}", case, keys, options)
        yield from _whole(folder / "whole", keys, options)
        yield _decoding(folder / "whole" / "checkpoint", keys, options)
        yield _encoding(folder / "whole" / "checkpoint", keys, options)
        if options.is_full:
            yield from _whole(folder / "many", MANY_KEYS, options)


def _delay(folder: Path, case: Case, keys: int, options: Options) -> Iterator[Row]:
    """Commit batches at the interval; yield the delays until their epochs are in the log, and until they are read."""
    checkpoint = _checkpoint(folder, keys)
    chance = np.random.default_rng(case.changes)
    count = WARM_UP_BATCHES + max(2, int(case.batches * options.scale))
    to_epoch, to_read = [], []
    with _attached(folder, "--serve", "--port", "0") as process:
        url = _url(process)
        with Client.from_url(url, timeout_s=TIMEOUT_S) as client:
            _await_count(client, 1)
            for batch in range(1, count + 1):
                changed = chance.choice(keys, min(keys, case.changes), replace=False)
                _write_batch(checkpoint, batch, np.union1d(changed, 0), case.interval_s)
                committed_ms = time.time_ns() / 1e6
                checkpoint.commit(batch)
                _await_count(client, batch + 1)
                read_ms = time.time_ns() / 1e6
                if batch > WARM_UP_BATCHES:
                    epoch = next(folder.glob(f"log/{JOB}/*/epochs/{batch}.json"))
                    to_epoch.append(epoch.stat().st_ctime_ns / 1e6 - committed_ms)
                    to_read.append(read_ms - committed_ms)
    of = f"{case.changes:,} changes a batch, without Spark"
    note = f"{len(to_read)} batches, one each {case.interval_s:g} s"
    yield percentile_row(f"commit to epoch, {of}, p50", PART, to_epoch, 0.5, note=note)
    yield percentile_row(f"commit to read, {of}, p50", PART, to_read, 0.5, budget=case.budget_p50_ms, note=note)
    yield percentile_row(f"commit to read, {of}, p99", PART, to_read, 0.99, note=note)


def _write_batch(checkpoint: WrittenCheckpoint, batch: int, numbers: npt.NDArray[np.int64], duration_s: float) -> None:
    """Plan a batch, and write its partitions one after the other in about this time, as tasks do."""
    began_s = time.monotonic()
    checkpoint.plan(batch)
    for partition in range(PARTITIONS):
        checkpoint.write_partition(batch, partition, numbers)
        time.sleep(max(0.0, began_s + duration_s * (partition + 1) / PARTITIONS - time.monotonic()))
    time.sleep(COMMITTED_AFTER_S)


def _await_count(client: Client, count: int) -> None:
    """Poll until the count of key 0, which each batch changes, has a value."""
    eventually(
        lambda: client.call("HGET", f"{JOB}:{STATE}:{key_of(0)}", "count"),
        lambda found: found == str(count),
        f"batch {count - 1} is readable",
        timeout_s=TIMEOUT_S,
        interval_s=POLL_PAUSE_S,
        error=BenchmarkError,
    )


def _whole(folder: Path, keys: int, options: Options) -> Iterator[Row]:
    """Yield the time, the processor time and the memory of a whole state."""
    _checkpoint(folder, keys)
    walls, cpus, peaks = [], [], []
    for number in range(min(options.rounds, 3)):
        options.report(f"state files: {keys:,} keys, round {number + 1}")
        log = folder / f"log{number}"
        began_s = time.monotonic()
        process = subprocess.Popen(
            [*COMMAND, "--checkpoint", str(folder / "checkpoint"), "--log", str(log)],
            stdout=subprocess.DEVNULL,
            env=children.environment(),
        )
        eventually(
            partial(_has_epoch, log),
            awaited="the whole state",
            timeout_s=TIMEOUT_S,
            error=BenchmarkError,
        )
        walls.append(time.monotonic() - began_s)
        process.send_signal(signal.SIGTERM)
        _, _, usage = os.wait4(process.pid, 0)
        process.returncode = 0
        cpus.append(usage.ru_utime + usage.ru_stime)
        peaks.append(usage.ru_maxrss / 1024)
    of = f"whole state of {keys:,} keys"
    note = f"{PARTITIONS} partitions, {os.cpu_count()} cores"
    yield single_row(f"{of}, until it is in the log", PART, walls, unit="s", note=note)
    yield single_row(f"{of}, processor time", PART, cpus, unit="s", note="all processes of sparkis attach")
    yield single_row(f"{of}, memory", PART, peaks, unit="MiB", note="the most that one process took")


def _has_epoch(log: Path) -> bool:
    return any(log.glob(f"{JOB}/*/epochs/0.json"))


def _decoding(folder: Path, keys: int, options: Options) -> Row:
    """Return the rate at which one core makes Arrow columns of a whole state's files."""
    (store,) = Checkpoint.at(str(folder)).batch_stores(0).stores
    rates = _rates(lambda: (batch for _, batch in store.whole(store.partitions, 0)), keys, options)
    return single_row(
        "rows decoded per second and core",
        PART,
        rates,
        unit="rows/s",
        better="more",
        note="a text as key, three numbers; from LZ4 files to Arrow",
    )


def _encoding(folder: Path, keys: int, options: Options) -> Row:
    """Return the rate at which one core makes change records of a batch's files."""
    checkpoint = Checkpoint.at(str(folder))
    records = ChangeWriter(bind(checkpoint, JOB, ()))
    (store,) = checkpoint.batch_stores(0).stores
    written = WrittenCheckpoint(folder, PARTITIONS)
    written.plan(1)
    changed = np.arange(0, keys, max(1, keys // ENCODED))
    written.write_changes(1, changed)
    written.commit(1)
    rates = _rates(
        lambda: records.runs(store.changes(store.partitions, 1), SkippedRows(), is_complete=False),
        len(changed),
        options,
    )
    return single_row(
        "changes made into change records per second and core",
        PART,
        rates,
        unit="rows/s",
        better="more",
        note="the same rows; from LZ4 files to sorted change records",
    )


def _rates(read: Callable[[], Iterable[pa.RecordBatch]], expected: int, options: Options) -> list[float]:
    """Return the rows per second of processor time in each round, after one that does not count."""
    rates = []
    for _ in range(1 + options.rounds):
        began_s = time.process_time()
        rows = sum(batch.num_rows for batch in read())
        if rows != expected:
            raise BenchmarkError(f"{rows} rows were read, and there are {expected}")
        rates.append(rows / (time.process_time() - began_s))
    return rates[1:]


def _checkpoint(folder: Path, keys: int) -> WrittenCheckpoint:
    """Make a checkpoint with one batch: a snapshot of all keys."""
    folder.mkdir()
    checkpoint = WrittenCheckpoint(folder / "checkpoint", PARTITIONS)
    checkpoint.plan(0)
    checkpoint.write_snapshot(0, keys)
    checkpoint.commit(0)
    return checkpoint


@contextmanager
def _attached(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, "--checkpoint", str(folder / "checkpoint"), "--log", str(folder / "log"), *words],
        stdout=subprocess.PIPE,
        text=True,
        env=children.environment() | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _url(process: subprocess.Popen[str]) -> str:
    """Return the address that the command prints."""
    assert process.stdout is not None
    printed: Sequence[str] = []
    for line in process.stdout:
        printed = [*printed, line]
        if found := re.search(r"redis-cli -u (\S+)", line):
            return found[1]
    raise BenchmarkError(f"sparkis attach has ended: {''.join(printed)}")
