"""Appliers, writers and readers are killed at random instants; what is left is a whole epoch, and it goes on."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from compat.processes import killed_at_end
from state_backend.lmdb.store import LmdbStore
from state_backend.log.change_log import ChangeLog
from state_backend.log.log_writer import LogWriter
from state_backend.model.records import Change, Op, changes_in
from tests.adversity.appliers import (
    GENERATION,
    JOB,
    KEYS,
    QUERY_ID,
    ROUNDS,
    STATES,
    RunningApplier,
    changes_of,
    epoch_at,
    growing_log,
)
from tests.builders import apply_epoch

pytestmark = pytest.mark.kill


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """A log that grows by itself, some dozens of epochs a second."""
    with growing_log(tmp_path / "log", every_s=0.02) as root:
        yield root


def test_killed_applier_comes_back_at_whole_epoch_and_continues(tmp_path: Path, log: Path) -> None:
    random = Random()
    last = -1
    path = None
    for number in range(ROUNDS):
        applier = RunningApplier(log, tmp_path / "store")
        if number % 3 == 2:
            time.sleep(random.uniform(0.0, 0.5))  # while it starts, as often as not
        else:
            applier.wait_for(last + 3)
            time.sleep(random.uniform(0.0, 0.1))
        applier.kill()
        assert applier.known["error"] == ""
        path = applier.known["path"] or path
        if path is not None and Path(path).is_dir():
            reached = epoch_at(path)
            assert reached >= max(last, applier.known["applied"])
            last = reached
    applier = RunningApplier(log, tmp_path / "store")
    applier.wait_for(last + 3)
    applier.kill()
    assert applier.epoch() >= last + 3


def test_killed_writer_loses_doubles_and_tears_no_epoch(tmp_path: Path) -> None:
    random = Random()
    root = tmp_path / "log"
    applier = RunningApplier(root, tmp_path / "store")
    last = -1
    for number in range(ROUNDS):
        with killed_at_end([sys.executable, __file__, "publish", str(root)]) as writer:
            if number % 2:
                time.sleep(random.uniform(0.0, 0.5))
            else:
                applier.wait_for(last + 3)
                time.sleep(random.uniform(0.0, 0.03))
            writer.kill()
        reached = assert_chain(root)
        assert reached >= last
        last = reached
        applier.wait_for(last)
        assert applier.epoch() == last
    assert applier.known["error"] == ""
    applier.kill()


def assert_chain(root: Path) -> int:
    """Walk a log as a reader does: each epoch is there once and holds what belongs to it; return the last."""
    log = ChangeLog(root).job(JOB)
    current = log.current()
    newest = None if current is None else log.newest(current)
    if current is None or newest is None:
        return -1
    before = None
    for number in range(newest.epoch + 1):
        epoch = log.epoch(current, number)
        assert epoch is not None
        assert epoch.previous == before
        before = epoch.ref
        found = [change for run in log.runs(GENERATION, epoch) for change in changes_in(run)]
        assert sorted(found) == sorted(changes_of(number))
    return newest.epoch


def publish_for_ever(root: str) -> None:
    """Publish as Spark does after a crash: the last batch once more, then one after the other."""
    with LogWriter(root, JOB, STATES, QUERY_ID) as writer:
        epoch = writer.last.epoch if writer.last else 0
        while True:
            writer.publish(changes_of(epoch), epoch)
            epoch += 1


def test_killed_reader_does_not_let_file_grow_for_ever(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, QUERY_ID)

    def apply(first: int, count: int) -> int:
        for number in range(first, first + count):
            changes = [Change("value", Op.PUT, key, None, b"%d" % number + b"x" * 500) for key in KEYS]
            apply_epoch(store, STATES, changes, number)
        return (tmp_path / "data.mdb").stat().st_size

    apply(0, 1)
    reader = subprocess.Popen(
        [sys.executable, __file__, "hold", str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert reader.stdout is not None
    assert reader.stdout.readline() == b"held\n"
    reader.kill()
    reader.communicate()
    before = apply(1, 5)
    held_back = apply(6, 30)
    assert held_back > 3 * before
    assert store.clear_stale_readers() == 1
    assert apply(36, 100) <= held_back + before
    store.close()


def hold_a_snapshot(path: str) -> None:
    """Open a snapshot and keep it until killed."""
    with LmdbStore(path, GENERATION, is_reader=True).snapshot(1) as snapshot:
        snapshot.key_info(b"key:0")
        print("held", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    {"publish": publish_for_ever, "hold": hold_a_snapshot}[sys.argv[1]](sys.argv[2])
