"""Shared by tests that kill appliers: the processes, the changes of each epoch, and the expected store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from compat.fork_server import ForkedProcess
from compat.waiting import eventually
from state_backend.codec import packed_map
from state_backend.lmdb.store import LmdbStore
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import StoreError
from state_backend.model.records import Change, Op
from state_backend.store.store import Snapshot

ROUNDS = int(os.environ.get("SPARKIS_KILL_ROUNDS", "5"))
JOB = "job"
QUERY_ID = "query"
GENERATION = f"{QUERY_ID}.1"
STATES = (
    StateDescriptor("value", key="k", value="v"),
    StateDescriptor("map", key="k", field="f", value="v"),
    StateDescriptor("top", key="k", member="m", score="s"),
)
KEYS = [b"key:%d" % number for number in range(200)]
FIELDS = [b"field:%d" % number for number in range(packed_map.FIELDS_MAX + 20)]
# The applier as the server starts it, but it copies its store without free pages at every opportunity.
APPLIER = """
import sys, state_backend.apply.applier as applier, state_backend.apply.store_copies as store_copies
store_copies.COMPACT_ABOVE_BYTES = 1 << 16
store_copies.COMPACT_PAUSE_S = 0.0
applier.main(sys.argv[1:])
"""


def scores_of(epoch: int) -> dict[bytes, int]:
    """Return the sorted set's scores, whose order differs in each epoch."""
    return {name: (number + 1) * (epoch + 1) % 149 for number, name in enumerate(FIELDS)}


def changes_of(epoch: int) -> list[Change]:
    """Return an epoch's changes: all values become its number, one key is added, and every third epoch is large."""
    text = b"%d" % epoch
    filling = b"x" * 500 if epoch % 3 == 0 else b""
    return [
        *(Change("value", Op.PUT, key, None, text + filling) for key in KEYS),
        *(Change("map", Op.PUT, b"map", name, text) for name in FIELDS),
        *(Change("top", Op.PUT, b"top", name, b"%d" % score) for name, score in scores_of(epoch).items()),
        Change("value", Op.PUT, b"epoch:%d" % epoch, None, text),
    ]


def assert_whole(snapshot: Snapshot) -> int:
    """Check that a snapshot has all epochs up to its own and no later one; return its epoch (-1: none yet)."""
    epoch = snapshot.applied.epoch
    _, keys = snapshot.scan(0, 1 << 30)
    if epoch < 0:
        assert keys == []
        return epoch
    last = {change.key: change.value for change in changes_of(epoch) if change.field is None}
    epochs = (b"epoch:%d" % each for each in range(epoch + 1))
    assert set(keys) == {*last, b"map", b"top", *epochs}
    for key, value in last.items():
        assert snapshot.value(key) == value
    for each in range(epoch + 1):
        assert snapshot.value(b"epoch:%d" % each) == b"%d" % each
    assert dict(snapshot.map_pairs(b"map")) == dict.fromkeys(FIELDS, b"%d" % epoch)
    ranking = sorted((score, name) for name, score in scores_of(epoch).items())
    assert [(score, name) for name, score in snapshot.sorted_members(b"top", 0, len(FIELDS) + 1)] == ranking
    assert snapshot.scores(b"top", FIELDS) == list(scores_of(epoch).values())
    assert snapshot.applied.keys == {"value": len(KEYS) + epoch + 1, "map": 1, "top": 1}
    return epoch


def epoch_at(path: str) -> int:
    """Open a store as a server does and return its checked epoch."""
    store = LmdbStore(path, GENERATION, is_reader=True)
    try:
        with store.snapshot(1) as snapshot:
            return assert_whole(snapshot)
    finally:
        store.close()


class RunningApplier:
    """An applier process, and its last report."""

    def __init__(self, log: Path, store: Path, *options: str, program: str = APPLIER) -> None:
        command = [sys.executable, "-c", program, "--log", log, "--job", JOB, "--store", store]
        self.process = ForkedProcess(
            [*map(str, command), "--probe-interval-s", "0.01", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.known: dict[str, Any] = {"applied": -1, "path": None, "error": ""}
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def epoch(self) -> int:
        """Open its store as a server does and return the checked epoch; the store may be a new, compacted one."""
        while True:
            path = self.known["path"]
            try:
                return epoch_at(path)
            except StoreError:
                eventually(lambda: self.known["path"], path.__ne__)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.endswith("\n"):
                return  # killed in the middle of it
            self.known = self.known | json.loads(line)

    def wait_for(self, epoch: int) -> None:
        """Wait until an epoch is reported as applied."""
        eventually(lambda: dict(self.known), lambda known: known["applied"] >= epoch, processes=[self.process])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def growing_log(root: Path, every_s: float) -> Iterator[Path]:
    """Publish epochs in a thread while the block runs."""
    end = threading.Event()

    def publish() -> None:
        with LogWriter(root, JOB, STATES, QUERY_ID) as writer:
            epoch = 0
            pause_s = every_s
            while not end.wait(pause_s):
                began_s = monotonic()
                writer.publish(changes_of(epoch), epoch)
                # On a busy machine the log grows more slowly, so that an applier reaches its end there, too.
                pause_s = max(every_s, 3 * (monotonic() - began_s))
                epoch += 1

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield root
    finally:
        end.set()
        thread.join()
