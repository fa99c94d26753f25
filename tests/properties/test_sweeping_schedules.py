"""Writers, rewinders, sweepers and readers of one log, stopped at any operation for any time: nothing is lost.

What runs is the real code: `LogWriter`, `compact` (snapshots and sweep), `read_snapshot`, and the walk of an applier.
`docs/design/0004-sweeping.md` has the argument that is tried here.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from compat.examples import examples
from state_backend.apply.applier import Applier
from state_backend.apply.compactor import compact
from state_backend.apply.replay import read_snapshot
from state_backend.log import change_files
from state_backend.log.change_log import ChangeLog, CurrentGeneration, JobLog
from state_backend.log.epochs import EpochRef
from state_backend.log.log_writer import LogWriter
from state_backend.log.terms import Term
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import (
    EpochHoleError,
    FencedWriterError,
    LogError,
    LogUnavailableError,
    RewoundCheckpointError,
    SparkisError,
)
from state_backend.model.records import Change, Op, changes_in
from tests.properties.schedules import ScheduledFilesystem, Scheduler

STATE = StateDescriptor("s", key="k", value="v")
FAR_MS = 1 << 50
LOGGERS = ("sparkis.log", "sparkis.applier")


class Acknowledged(NamedTuple):
    """An epoch that its writer was told is committed."""

    query: str
    term: int
    generation: str
    epoch: int
    value: bytes


class Writer(LogWriter):
    """A LogWriter that notes which epochs its rewinds drop."""

    rewinds: dict[int, int]
    _number = 0

    def _rewind(self, number: int) -> None:
        self._number = number
        super()._rewind(number)

    def _put_in_charge(self, term: Term) -> None:
        if term.reason == "rewind":
            Writer.rewinds[term.term] = self._number  # which counts once its file is there
        super()._put_in_charge(term)


class Scene:
    """One job, and who works on it."""

    def __init__(self, seed: int) -> None:
        self.scheduler = Scheduler(seed)
        self.random = self.scheduler.random
        self.filesystem = ScheduledFilesystem(self.scheduler)
        self.acknowledged: list[Acknowledged] = []
        self.checkpoints: dict[str, int] = {}  # by query: the next batch, as Spark has written it down
        self.set_back: list[tuple[int, int]] = []  # terms whose writer set the checkpoint back, and to where
        self.offered: dict[tuple[str, int], set[bytes]] = {}  # by query and epoch: all that was ever tried
        self.seen: dict[tuple[str, int], tuple[int, bytes]] = {}  # by generation and epoch: what a reader saw
        self.count = self.reads = self.rewinds = 0
        Writer.rewinds = {}
        self.filesystem.on_create = self._note_rewind

    # Actors

    def write(self, query: str, back: int, epochs: int, lives: int) -> None:
        """Write a query's micro-batches; begin again after an error, as Spark does. `back`: the checkpoint is older."""
        for _ in range(lives):
            try:
                writer = Writer(self.filesystem, "job", [STATE], query, "truncate", takeover=True)
                batch = self.checkpoints.get(query, 0)
                if back and batch:
                    batch, back = max(0, batch - back), 0
                    self.checkpoints[query] = batch
                    self.set_back.append((writer.current.term, batch))
                for number in range(batch, batch + epochs):
                    self._publish(writer, query, number)
            except (FencedWriterError, LogUnavailableError, EpochHoleError, RewoundCheckpointError):
                continue

    def _publish(self, writer: Writer, query: str, number: int) -> None:
        self.count += 1
        value = b"%d" % self.count
        self.offered.setdefault((query, number), set()).add(value)
        is_replay = writer.last is not None and writer.last.epoch == number
        change = Change("s", Op.PUT, b"e%d" % number, None, value)
        writer.publish([change], number, clock_ms=1_000 + number)
        if not is_replay:
            self.acknowledged.append(Acknowledged(query, writer.current.term, writer.generation, number, value))
        # SentFacts so late that the checkpoint was set back meanwhile, and another writer went on from there.
        if not any(term > writer.current.term and first <= number for term, first in self.set_back):
            self.checkpoints[query] = number + 1

    def compact(self, times: int) -> None:
        """Write snapshots and sweep all that can be swept."""
        for _ in range(times):
            try:
                with read_snapshot(self.filesystem, "job", at_ms=0) as shown:
                    compact(ChangeLog(self.filesystem).job("job"), shown, retention_ms=0, at_ms=FAR_MS)
            except SparkisError:
                continue

    def follow(self, looks: int) -> None:
        """Walk the chain as an applier does."""
        log = ChangeLog(self.filesystem).job("job")
        generation, at = "", None
        for _ in range(looks):
            try:
                current = log.current()
                if current is None:
                    continue
                if current.generation != generation:
                    generation, at = current.generation, None
                if at is None:
                    at = self._begin(log, current)
                    continue
                epoch = log.epoch(current, at.epoch + 1)
                if epoch is None:
                    newest = next(log.snapshots(current), None)
                    if newest is not None and newest.epoch > at.epoch:
                        at = newest.ref
                    continue
                assert epoch.previous == at, f"led off the chain: {epoch.ref} follows {epoch.previous}, not {at}"
                self._note(log, current, epoch.epoch)
                at = epoch.ref
            except LogError:
                continue

    def apply(self, folder: Path, steps: int) -> None:
        """Follow with an applier."""
        applier = Applier(ChangeLog(self.filesystem), "job", folder, lambda event: None)
        try:
            for _ in range(steps):
                applier.step()
        finally:
            applier.close()

    def check_applier(self, folder: Path) -> None:
        """An applier goes on from the store that the last one left, and comes to what there is to be read."""
        events: list[dict[str, Any]] = []
        applier = Applier(ChangeLog(self.filesystem), "job", folder, events.append)
        for _ in range(3):
            applier.step()
        assert not events[-1]["error"]
        with read_snapshot(self.filesystem, "job", at_ms=0) as expected:
            assert applier.store is not None
            with applier.store.snapshot(0) as shown:
                assert shown.applied.epoch == expected.applied.epoch
                assert list(shown.changes()) == list(expected.changes())
        applier.close()

    def _begin(self, log: JobLog, current: CurrentGeneration) -> EpochRef | None:
        newest = next(log.snapshots(current), None)
        if newest is not None:
            return newest.ref
        first = log.first(current)
        return first.ref if first is not None and first.previous is None else None

    def _note(self, log: JobLog, current: CurrentGeneration, number: int) -> None:
        epoch = log.epoch(current, number)
        if epoch is None:
            return
        (change,) = [change for run in log.runs(current.generation, epoch) for change in changes_in(run)]
        assert change.value is not None
        mine = epoch.term, change.value
        assert self.seen.setdefault((current.generation, number), mine) == mine, "two contents of one epoch"

    def _note_rewind(self, path: str, content: bytes) -> None:
        """Set the checkpoint back at the moment at which a rewind counts."""
        if path.startswith("job/terms/") and path.endswith(".json"):
            term = json.loads(content)
            if term["reason"] == "rewind":
                self.checkpoints[term["query_id"]] = Writer.rewinds[term["term"]]
                self.set_back.append((term["term"], Writer.rewinds[term["term"]]))
                self.rewinds += 1

    # What has to be true at any moment

    def check(self) -> None:
        """While all others stand still, a reader that starts now reads all that has to be there."""
        log = ChangeLog(self.filesystem).job("job")
        current = log.current()
        if current is None or log.end(current) is None:
            assert not list(self.required(log, current))
            return
        with read_snapshot(self.filesystem, "job", at_ms=0) as shown:
            found = {key: shown.value(key) for key in shown.scan(0, 1 << 20)[1]}
        self.reads += 1
        assert current.description is not None
        for key, value in found.items():
            assert value in self.offered[current.description.query_id, int(key[1:])]
        for each in self.required(log, current):
            assert found.get(b"e%d" % each.epoch) == each.value, f"{each} is lost, and was acknowledged"
        for number in log.numbers(current.generation):
            self._note(log, current, number)

    def go_on(self) -> None:
        """While all others stand still for ever, each query can go on, and be read."""
        for query in self.random.sample(("p", "q"), 2):
            writer = Writer(self.filesystem, "job", [STATE], query, "truncate", takeover=True)
            with suppress(RewoundCheckpointError):  # what was before is swept
                self._publish(writer, query, self.checkpoints.get(query, 0))
            self.check()

    def required(self, log: JobLog, current: CurrentGeneration | None) -> Iterator[Acknowledged]:
        """Iterate over what was acknowledged and not dropped by a rewind, or replaced by another query, since."""
        terms = list(log.terms.down_from(current.term)) if current is not None else []
        for each in self.acknowledged:
            later = [term for term in terms if term.term > each.term and not term.is_void]
            if all(
                term.reason == "restart" or (term.reason == "rewind" and Writer.rewinds[term.term] > each.epoch)
                for term in later
            ) and any(term.term == each.term for term in terms):
                yield each


ids = Random()


def run(seed: int, store: Path | None = None) -> Scene:
    """Run one schedule; with a store's folder, an applier follows as well."""
    ids.seed(seed)
    scene = Scene(seed)
    random, add = scene.random, scene.scheduler.add
    add("writer", lambda: scene.write("q", 0, random.randrange(3, 8), 4))
    add("zombie", lambda: scene.write("q", 0, random.randrange(1, 6), 3))
    add("rewinder", lambda: scene.write("q", random.randrange(1, 5), random.randrange(1, 6), 2))
    if random.random() < 0.4:
        add("second", lambda: scene.write("p", 0, random.randrange(1, 5), random.randrange(1, 3)))
    add("one", lambda: scene.compact(random.randrange(1, 6)))
    add("two", lambda: scene.compact(random.randrange(1, 6)))
    add("reader", lambda: scene.follow(60))
    if store is not None:
        add("applier", lambda: scene.apply(store, 40))

    def between() -> None:
        if random.random() < 0.15:
            scene.check()

    try:
        scene.scheduler.run(300, between)
        scene.check()
        scene.go_on()
    finally:
        scene.scheduler.end()
    if store is not None:
        scene.check_applier(store)
    return scene


@pytest.fixture(autouse=True)
def all_in_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every epoch has a change file, ids follow from the seed, and nothing is logged."""
    monkeypatch.setattr(change_files, "INLINE_BYTES_MAX", -1)
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=ids.getrandbits(128), version=4))
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    yield
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.NOTSET)


# 25 schedules by default, of some 2,500 operations each; `make test-slow` runs 20,000 others.
@pytest.mark.parametrize(
    "first",
    [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(100_000, 120_000, 1_000))],
)
def test_no_acknowledged_epoch_is_lost_in_any_schedule(first: int) -> None:
    scenes = [run(seed) for seed in range(first, first + (25 if first < 100_000 else 1_000))]
    assert sum(len(scene.acknowledged) for scene in scenes) > 10 * len(scenes)
    assert sum(scene.reads for scene in scenes) > 5 * len(scenes)
    assert sum(bool(scene.rewinds) for scene in scenes) > len(scenes) // 10, "rewinds began"
    assert sum(any(path.endswith(".swept") for path in scene.filesystem.files) for scene in scenes) > len(scenes) // 20


def test_applier_follows_through_any_schedule(tmp_path: Path) -> None:
    for seed in range(200_000, 200_000 + examples(10)):
        run(seed, tmp_path / str(seed))
