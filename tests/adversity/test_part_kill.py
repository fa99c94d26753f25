"""Owners of slots, and the processes that write their parts of snapshots and sweep, are killed at random instants."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from compat.waiting import eventually
from state_backend.apply.replay import read_snapshot
from state_backend.log.change_log import ChangeLog
from state_backend.log.log_writer import LogWriter
from tests.adversity.appliers import GENERATION, JOB, QUERY_ID, ROUNDS, STATES, RunningApplier, changes_of, growing_log

pytestmark = pytest.mark.kill

# An owner whose every other writer is killed: while it starts, while it writes, while it joins or sweeps.
OWNER = """
import sys, state_backend.apply.applier as applier, state_backend.apply.compactor as compactor
compactor.EPOCHS_MAX, compactor.LEAD_EPOCHS = 20, 5
compactor.Compactor._command = lambda self: [sys.executable, "-c", '''
import os, random, signal, sys, threading
if random.random() < 0.5:
    kill = threading.Timer(random.uniform(0.0, 1.5), os.kill, (os.getpid(), signal.SIGKILL))
    kill.daemon = True
    kill.start()
import state_backend.apply.compactor as compactor
sys.exit(compactor.main(sys.argv[1:]))
''', "--log", self._root, "--job", self._job, "--retention-ms", "0"]
applier.main(sys.argv[1:])
"""
OWNER_WITHOUT_KILLS = OWNER.replace("random.random() < 0.5", "False")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """A log that grows by itself, a dozen epochs a second."""
    with growing_log(tmp_path / "log", every_s=0.05) as root:
        yield root


@pytest.mark.slow
def test_new_reader_finds_every_epoch_after_any_kill(tmp_path: Path, log: Path) -> None:
    random = Random()

    def owner(which: int, program: str = OWNER) -> RunningApplier:
        slots = ("0-8191", "8192-16383")[which]
        return RunningApplier(log, tmp_path / f"store{which}", "--slots", slots, "--compact", program=program)

    owners = [owner(0), owner(1)]
    last = -1
    for number in range(ROUNDS):
        reader = RunningApplier(log, tmp_path / f"reader{number}")
        reader.wait_for(last + 25)  # so that there was a mark meanwhile
        reader.kill()
        last = reader.epoch()
        which = random.randrange(2)
        if random.random() < 0.5:
            owners[which].kill()
            owners[which] = owner(which)
    for which in (0, 1):
        owners[which].kill()
        owners[which] = owner(which, OWNER_WITHOUT_KILLS)
    snapshots = Snapshots(log)
    snapshots.wait_for_another_than(snapshots.newest())
    for each in owners:
        each.wait_for(last)
        each.kill()


class Snapshots:
    """What is in the log by now."""

    def __init__(self, root: Path) -> None:
        self._log = ChangeLog(root).job(JOB)

    def newest(self) -> int:
        current = self._log.current()
        assert current is not None
        return next((each.epoch for each in self._log.snapshots(current)), -1)

    def wait_for_another_than(self, epoch: int) -> None:
        assert eventually(self.newest, lambda newest: newest != epoch) > epoch


def test_state_read_from_parts_alone_is_whole(tmp_path: Path) -> None:
    """As above, at its end: the log forgot its first epochs, and what is left is all of the state."""
    root = tmp_path / "log"
    owners = []
    for which, slots in enumerate(("0-8191", "8192-16383")):
        store = tmp_path / f"store{which}"
        owners.append(RunningApplier(root, store, "--slots", slots, "--compact", program=OWNER_WITHOUT_KILLS))
    log = ChangeLog(root).job(JOB)
    with LogWriter(root, JOB, STATES, QUERY_ID) as writer:
        epoch = 0
        while epoch < 50 or log.numbers(GENERATION)[0] == 0:
            assert epoch < 3000
            writer.publish(changes_of(epoch), epoch)
            for each in owners:
                each.wait_for(epoch)
            epoch += 1
    with read_snapshot(root, JOB) as shown:
        assert set(shown.scan(0, 1 << 30)[1]) >= {b"epoch:%d" % each for each in range(epoch)}
    for each in owners:
        each.kill()
