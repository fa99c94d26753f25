"""A checkpoint in which anything happens, and an attachment: its log has the state of each batch exactly once.

The checkpoint is written as Spark writes one with the HDFS-backed provider: a delta for each batch and partition, then
the commit. Tries of a batch fail before their commit, snapshots are written, old files are removed, the query is set
back, the attachment is stopped and started. The model is the state after each committed batch.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from compat.examples import examples
from compat.waiting import eventually
from state_backend import folder_watch
from state_backend.attach import attachment
from state_backend.attach.attachment import Attachment
from state_backend.attach.start import attach_files
from state_backend.checkpoint.compression import LZ4, LZ4_HEADER, LZ4_SEED, LZ4_STORED
from state_backend.checkpoint.hashes import xxhash32
from state_backend.log.change_log import ChangeLog
from state_backend.model.errors import LogError
from tests.unit.state_backend.attach.following import JOB, epochs, values_in_log

PARTITIONS = 2
KEYS = tuple("abcdef")
Changes = Mapping[str, int | None]
CHANGES = st.dictionaries(st.sampled_from(KEYS), st.one_of(st.none(), st.integers(0, 1 << 40)))


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the attachment look for set-backs after each pause, and read what a try has written before it fails."""
    monkeypatch.setattr(attachment, "LISTING_INTERVAL_LOCAL_S", 0.005)
    monkeypatch.setattr(attachment, "RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr(folder_watch, "PAUSE_S", 0.001)


class Following(RuleBasedStateMachine):
    """The query, the people who run it, and the attachment."""

    @initialize(changes=CHANGES)
    def begin(self, changes: Changes) -> None:
        self.scratch = tempfile.TemporaryDirectory()
        self.folder = Path(self.scratch.name, "checkpoint")
        self.log = Path(self.scratch.name, "log")
        for name in ("offsets", "commits", "state/0/0/_metadata", "state/0/1"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "metadata").write_text('{"id":"q"}')
        (self.folder / "state/0/0/_metadata/schema").write_bytes(schema())
        self.states: dict[int, dict[str, int]] = {-1: {}}
        self.newest = -1
        self.kept_from = 0  # earlier batches are purged
        self.time_ms = 1_760_000_000_000
        self.run(changes)
        self.attached: Attachment | None = attach_files(str(self.folder), job=JOB, log=str(self.log))

    def teardown(self) -> None:
        if hasattr(self, "scratch"):
            self.stop()
            self.scratch.cleanup()

    def stop(self) -> None:
        if self.attached is not None:
            self.attached.stop()
            self.attached = None

    def run(self, changes: Changes) -> None:
        batch = self.newest + 1
        self.try_batch(changes)
        (self.folder / f"commits/{batch}").write_text("v1\n{}")
        state = self.states[batch - 1] | changes
        self.states[batch] = {key: value for key, value in state.items() if value is not None}
        self.newest = batch

    @rule(changes=CHANGES)
    def try_batch(self, changes: Changes) -> None:
        """Plan the next batch, and write its state, as a try does that fails."""
        batch = self.newest + 1
        self.time_ms += 1
        header = {"batchTimestampMs": self.time_ms, "conf": {"spark.sql.shuffle.partitions": str(PARTITIONS)}}
        (self.folder / f"offsets/{batch}").write_text(f"v1\n{json.dumps(header)}\n-")
        for partition in range(PARTITIONS):
            self.write(f"{partition}/{batch + 1}.delta", {k: v for k, v in changes.items() if ord(k) % 2 == partition})

    @rule(batches=st.lists(CHANGES, min_size=1, max_size=3))
    def run_batches(self, batches: list[Changes]) -> None:
        for changes in batches:
            self.run(changes)
        self.check()

    @rule()
    def write_snapshots(self) -> None:
        for partition in range(PARTITIONS):
            state = {key: value for key, value in self.states[self.newest].items() if ord(key) % 2 == partition}
            self.write(f"{partition}/{self.newest + 1}.snapshot", state)

    @rule(kept=st.integers(1, 3))
    def purge(self, kept: int) -> None:
        """Remove old batches, and the deltas that the snapshots have made needless."""
        self.write_snapshots()
        first = max(self.kept_from, self.newest + 1 - kept)
        for batch in range(self.kept_from, first):
            (self.folder / f"commits/{batch}").unlink()
            (self.folder / f"offsets/{batch}").unlink()
            for partition in range(PARTITIONS):
                self.write(f"{partition}/{first}.snapshot", self.part(first - 1, partition))
                (self.folder / f"state/0/{partition}/{batch + 1}.delta").unlink()
        self.kept_from = first
        self.check()

    def part(self, batch: int, partition: int) -> dict[str, int]:
        return {key: value for key, value in self.states[batch].items() if ord(key) % 2 == partition}

    @precondition(lambda self: self.newest > self.kept_from)
    @rule(data=st.data(), batches=st.lists(CHANGES, max_size=4))
    def set_back(self, data: st.DataObject, batches: list[Changes]) -> None:
        """Remove the last batches, and run some anew, perhaps further than before."""
        target = data.draw(st.integers(self.kept_from, self.newest - 1))
        for batch in range(self.newest, target, -1):
            (self.folder / f"commits/{batch}").unlink()
            (self.folder / f"offsets/{batch}").unlink()
            for partition in range(PARTITIONS):
                (self.folder / f"state/0/{partition}/{batch + 1}.snapshot").unlink(missing_ok=True)
        (self.folder / f"offsets/{self.newest + 1}").unlink(missing_ok=True)
        self.newest = target
        self.run_batches(batches)

    @rule()
    def stop_or_start(self) -> None:
        if self.attached is not None:
            self.stop()
        else:
            self.attached = attach_files(str(self.folder), job=JOB, log=str(self.log))
            self.check()

    def check(self) -> None:
        """Wait until the log is as the query; it must have each batch of its generation once, in order."""
        if self.attached is None:
            return
        expected = {
            f"{JOB}:aggregation:{key}".encode(): b"%d" % value for key, value in self.states[self.newest].items()
        }
        eventually(self.seen, lambda seen: seen == (self.newest, self.stamp(), expected))
        numbers = epochs(self.log)
        assert numbers == list(range(numbers[0], self.newest + 1))
        assert self.attached.error is None

    def stamp(self) -> int:
        """Return when the newest batch was planned."""
        header = (self.folder / f"offsets/{self.newest}").read_text().split("\n")[1]
        return int(json.loads(header)["batchTimestampMs"])

    def seen(self) -> tuple[int, int, dict[bytes, object]] | None:
        """Return the last batch in the log, when it was planned, and the state; None while there is none."""
        with suppress(LogError):
            job = ChangeLog(str(self.log)).job(JOB)
            current = job.current()
            numbers = epochs(self.log)
            if current is not None and numbers:
                epoch = job.epoch(current, numbers[-1])
                assert epoch is not None
                return epoch.epoch, epoch.clock_ms, values_in_log(self.log)
        return None

    def write(self, name: str, changes: Changes) -> None:
        """Write a delta or a snapshot; an older one is replaced as a whole."""
        path = self.folder / "state/0" / name
        unfinished = path.with_name(f".{path.name}.tmp")
        unfinished.write_bytes(compressed(b"".join(records(changes)) + struct.pack(">i", -1)))
        unfinished.rename(path)


def records(changes: Changes) -> Iterator[bytes]:
    for key, value in changes.items():
        row = struct.pack("<qq8s", 0, 16 << 32 | len(key), key.encode())
        yield struct.pack(">i", len(row)) + row
        yield struct.pack(">i", -1) if value is None else struct.pack(">i", 16) + struct.pack("<qq", 0, value)


def compressed(content: bytes) -> bytes:
    checksum = xxhash32(content, LZ4_SEED) & 0x0FFFFFFF
    block = LZ4_HEADER.pack(LZ4, LZ4_STORED, len(content), len(content), checksum) + content
    return block + LZ4_HEADER.pack(LZ4, LZ4_STORED, 0, 0, 0)


def schema() -> bytes:
    """Return the schemas of the key and the value, version 2."""
    found = struct.pack(">H", 2) + b"v2"
    for name, kind in (("key", "string"), ("count", "long")):
        fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}}]
        text = json.dumps({"type": "struct", "fields": fields}).encode()
        found += struct.pack(">iH", 1, len(text)) + text
    return found


TestFollowing = Following.TestCase
TestFollowing.settings = settings(max_examples=examples(10), stateful_step_count=12, deadline=None)
