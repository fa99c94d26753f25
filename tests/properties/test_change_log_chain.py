"""Whatever writers do to a log, and wherever they die, its readers see one whole chain."""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path
from unittest.mock import patch

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from compat.examples import examples
from state_backend.log.change_log import ChangeLog
from state_backend.log.filesystems import LocalFilesystem
from state_backend.log.log_writer import LogWriter, OnRewind
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import (
    EpochHoleError,
    FencedWriterError,
    LogUnavailableError,
    RewoundCheckpointError,
)
from state_backend.model.records import Change, Op, changes_in

STATE = StateDescriptor("s", key="k", value="v")


class Crash(BaseException):
    """The writer's process dies here."""


class CrashingFilesystem(LocalFilesystem):
    """A filesystem whose process dies at the n-th step that changes a name, before or after it."""

    steps_left: int | None = None

    def _step(self) -> None:
        if self.steps_left is not None:
            if self.steps_left == 0:
                raise Crash
            self.steps_left -= 1

    def create(self, path: str, content: bytes) -> bool:
        self._step()
        is_new = super().create(path, content)
        self._step()
        return is_new

    def replace(self, path: str, content: bytes, *, is_durable: bool = True) -> None:
        self._step()
        super().replace(path, content, is_durable=is_durable)
        self._step()

    def remove(self, path: str) -> None:
        self._step()
        super().remove(path)
        self._step()


class LogChain(RuleBasedStateMachine):
    """Several writers of one job; the model is the list of values that were committed, one an epoch."""

    def __init__(self) -> None:
        super().__init__()
        logging.getLogger("sparkis.log").setLevel(logging.ERROR)
        self.root = Path(tempfile.mkdtemp())
        self.writers: list[LogWriter] = []
        self.generation = "q0"
        self.committed: list[bytes] = []
        self.count = 0

    def teardown(self) -> None:
        logging.getLogger("sparkis.log").setLevel(logging.NOTSET)
        shutil.rmtree(self.root)

    def open_writer(self, filesystem: LocalFilesystem, on_rewind: OnRewind = "truncate") -> LogWriter:
        return LogWriter(filesystem, "job", [STATE], self.generation, on_rewind, sends_heartbeats=False, takeover=True)

    @property
    def newest(self) -> LogWriter:
        return self.writers[-1]

    def value(self) -> bytes:
        self.count += 1
        return b"%d" % self.count

    @rule(on_rewind=st.sampled_from(("refuse", "truncate")))
    def start_writer(self, on_rewind: OnRewind) -> None:
        self.writers.append(self.open_writer(LocalFilesystem(self.root), on_rewind))
        last = self.newest.last
        assert (last.epoch if last else -1) == len(self.committed) - 1

    @rule()
    def start_generation(self) -> None:
        self.generation = f"q{self.count}"
        self.count += 1
        self.committed = []
        self.writers.append(self.open_writer(LocalFilesystem(self.root)))

    @precondition(lambda self: self.writers)
    @rule()
    def commit(self) -> None:
        value = self.value()
        assert self.newest.publish([Change("s", Op.PUT, b"k", None, value)]) == len(self.committed)
        self.committed.append(value)

    @precondition(lambda self: self.committed and self.writers)
    @rule()
    def replay(self) -> None:
        self.newest.publish([Change("s", Op.PUT, b"k", None, self.value())], epoch=len(self.committed) - 1)

    @precondition(lambda self: len(self.writers) > 1)
    @rule(ahead=st.integers(-2, 2), data=st.data())
    def commit_by_a_fenced_writer(self, ahead: int, data: st.DataObject) -> None:
        fenced = data.draw(st.sampled_from(self.writers[:-1]))
        try:
            fenced.publish([Change("s", Op.PUT, b"k", None, b"lost")], epoch=max(0, len(self.committed) + ahead))
        except FencedWriterError:
            return
        raise AssertionError("a fenced writer committed")

    @precondition(lambda self: self.writers)
    @rule()
    def commit_by_a_writer_that_is_fenced_meanwhile(self) -> None:
        """The older writer looks, the newer one takes over, the older one goes on: one of them has the epoch."""
        older = self.newest
        last = older.last
        newer = self.open_writer(LocalFilesystem(self.root))
        self.writers.append(newer)
        if older.generation != newer.generation or (last.epoch if last else -1) != len(self.committed) - 1:
            return
        value = self.value()
        looks = iter((lambda: None, older.check_in_charge))
        with patch.object(older, "check_in_charge", lambda: next(looks)()):
            try:
                older.publish([Change("s", Op.PUT, b"k", None, value)])
            except FencedWriterError:  # it looks again, so nobody is told that this epoch is committed; yet it stands
                self.committed.append(value)
            else:
                raise AssertionError("a fenced writer was told that its epoch is committed")
        try:
            newer.publish([Change("s", Op.PUT, b"k", None, b"second")])
        except LogUnavailableError:
            pass
        else:
            raise AssertionError("an epoch was committed twice")
        self.writers.append(self.open_writer(LocalFilesystem(self.root)))

    @precondition(lambda self: self.writers)
    @rule(gap=st.integers(1, 3))
    def leave_a_hole(self, gap: int) -> None:
        if not self.committed:
            return
        try:
            self.newest.publish([], epoch=len(self.committed) + gap)
        except EpochHoleError:
            return
        raise AssertionError("a hole was committed")

    @precondition(lambda self: self.writers and len(self.committed) > 1)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.committed) - 2))
        value = self.value()
        try:
            self.newest.publish([Change("s", Op.PUT, b"k", None, value)], epoch=number)
        except RewoundCheckpointError:
            assert self.newest._on_rewind == "refuse"
            return
        self.committed[number:] = [value]

    @rule(steps=st.integers(0, 12), epochs=st.integers(0, 2), back=st.integers(0, 4))
    def crash(self, steps: int, epochs: int, back: int) -> None:
        """A writer dies somewhere on the way: taking over, committing, or rewinding."""
        filesystem = CrashingFilesystem(self.root)
        filesystem.steps_left = steps
        states = [list(self.committed)]
        try:
            writer = self.open_writer(filesystem)
            for number in range(epochs + 1):
                value = self.value()
                chain = states[-1]
                at = max(0, len(chain) - back) if number == 0 else len(chain)
                is_replay = bool(chain) and at == len(chain) - 1
                if at < len(chain) and not is_replay:
                    states.append(chain[:at])
                states.append(chain if is_replay else [*chain[:at], value])
                writer.publish([Change("s", Op.PUT, b"k", None, value)], epoch=at)
        except Crash:
            pass
        found = self.read()
        assert found in states[-3:]
        self.committed = found
        self.writers.append(self.open_writer(LocalFilesystem(self.root)))

    def read(self) -> list[bytes]:
        """Walk the chain as a reader does."""
        log = ChangeLog(self.root).job("job")
        current = log.current()
        if current is None or current.description is None or current.description.query_id != self.generation:
            return list(self.committed)
        newest = log.newest(current)
        found: list[bytes] = []
        before = None
        for number in range(newest.epoch + 1 if newest else 0):
            epoch = log.epoch(current, number)
            assert epoch is not None
            assert epoch.previous == before
            before = epoch.ref
            (change,) = [change for run in log.runs(current.generation, epoch) for change in changes_in(run)]
            assert change.value is not None
            found.append(change.value)
        return found

    @invariant()
    def chain_is_whole(self) -> None:
        assert self.read() == self.committed


TestLogChain = LogChain.TestCase
TestLogChain.settings = settings(
    max_examples=examples(10), stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
