"""The cost of a store's checksums: the same calls with checksums, and with every checksum test removed.

Processor time in one process without a server, where their share is largest. The file is in the page cache.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.options import Options
from benchmarks.results import Row, compared_row, single_row
from benchmarks.servers import temporary_folder
from state_backend.lmdb import bulk_writer, record_format, record_reader
from state_backend.lmdb.bulk_writer import BulkWriter
from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op, runs_of
from state_backend.store.store import EpochChanges

KEYS = 1_000_000
LOOK_UPS = 200_000
CHANGES = 100_000
STATE = StateDescriptor("v", key="k", value="v").for_job("job")
# In a reader: the test and its exception. In a writer: the checksum behind a value, here a constant of the same size.
CHECK_IN_READER = re.compile(r"\n +if [^\n]*checksum\([^\n]*\) != CRC_RESIDUE:\n +raise damaged\(\)")
CHECK_IN_WRITER = re.compile(r"checksum\(new\)\.to_bytes\(CHECK_BYTES, \"little\"\)")


def run(options: Options) -> Iterator[Row]:
    """Yield a row for each kind of call."""
    keys = max(10_000, int(KEYS * options.scale))
    with temporary_folder() as folder:
        options.report(f"checksums: writing {keys:,} keys")
        store = LmdbStore(folder / "store", "g")
        _apply(store, range(keys), b"0")
        yield from _reads(options, store, keys)
        yield from _writes(options, folder)
        started_s = time.process_time()
        store.verify()
        took_s = time.process_time() - started_s
        yield single_row("verify a store", "checksums", [took_s], unit="s", note=f"{keys:,} keys")
        store.close()


def _key(number: int) -> bytes:
    return b"job:v:sensor_%08d" % number


def _apply(store: LmdbStore, numbers: range, head: bytes) -> float:
    changes = (Change("v", Op.PUT, _key(number), None, b"%b.%012d" % (head, number)) for number in numbers)
    runs = list(runs_of(changes, ["v"]))
    started_s = time.process_time()
    store.apply(EpochChanges(store.applied.epoch + 1, 1, 1, runs), [STATE])
    return time.process_time() - started_s


def _without(function: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """Return a copy of a function without checksums; RuntimeError if it has none."""
    source = textwrap.dedent(inspect.getsource(function))
    unchecked, count = CHECK_IN_READER.subn("", source)
    unchecked, more = CHECK_IN_WRITER.subn("bytes(CHECK_BYTES)", unchecked)
    if not count + more:
        raise RuntimeError(f"{function.__qualname__} has no checksum that could be removed")
    namespace: dict[str, Any] = {}
    exec(unchecked, vars(module), namespace)
    found: Callable[..., Any] = namespace[function.__name__]
    return found


def _reads(options: Options, store: LmdbStore, keys: int) -> Iterator[Row]:
    keys_to_read = [_key(number * 7919 % keys) for number in range(int(LOOK_UPS * max(options.scale, 0.05)))]
    original = record_format.find
    unchecked = _without(original, record_format)
    pairs = []
    for number in range(options.rounds):
        options.report(f"checksums: look-ups, round {number + 1} of {options.rounds}")
        pair = []
        for function in (original, unchecked):
            vars(record_reader)["find"] = function
            with store.snapshot(1) as snapshot:
                started_s = time.process_time()
                for key in keys_to_read:
                    snapshot.lazy_value(key)
                pair.append((time.process_time() - started_s) / len(keys_to_read) * 1e6)
        vars(record_reader)["find"] = original
        pairs.append((pair[0], pair[1]))
    yield compared_row(
        "look up a value",
        "checksums",
        pairs,
        unit="us",
        better="less",
        peer_name="without checksums",
        note=f"{keys:,} keys",
    )


def _writes(options: Options, folder: Path) -> Iterator[Row]:
    original = BulkWriter.put_run
    unchecked = _without(original, bulk_writer)
    changes = max(10_000, int(CHANGES * options.scale))
    pairs = []
    for number in range(options.rounds):
        options.report(f"checksums: apply, round {number + 1} of {options.rounds}")
        pair = []
        for side, function in enumerate((original, unchecked)):
            BulkWriter.put_run = function  # type: ignore[method-assign]
            store = LmdbStore(folder / f"{number}-{side}", "g")
            store._pages = None  # the compiled core always makes checksums
            _apply(store, range(changes), b"0")
            pair.append(_apply(store, range(changes), b"1") / changes * 1e6)
            store.close()
        BulkWriter.put_run = original  # type: ignore[method-assign]
        pairs.append((pair[0], pair[1]))
    yield compared_row(
        "apply a change of a value", "checksums", pairs, unit="us", better="less", peer_name="without checksums",
        note=f"{changes:,} changes of an epoch, without the compiled core",
    )  # fmt: skip
