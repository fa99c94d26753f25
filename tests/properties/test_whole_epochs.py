"""Readers in other processes see whole epochs only, while a writer applies them as fast as it can."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from compat.waiting import WAIT_S_MAX
from state_backend.codec import packed_map
from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op, runs_of
from state_backend.store.store import EpochChanges, Snapshot

EPOCHS = 150
KEYS = [b"key:%d" % number for number in range(300)]
FIELDS = [b"field:%d" % number for number in range(packed_map.FIELDS_MAX + 20)]
STATES = (
    StateDescriptor("value", key="k", value="v"),
    StateDescriptor("small", key="k", value=("a", "b")),
    StateDescriptor("large", key="k", field="f", value="v"),
)


def epoch_of(number: int) -> EpochChanges:
    """Return an epoch in which everything says its number, and even and odd ones have keys of their own."""
    text = b"%d" % number
    changes = [
        *(Change("value", Op.PUT, key, None, text) for key in KEYS),
        Change("small", Op.PUT, b"small", None, packed_map.pack([(b"a", text), (b"b", text)])),
        *(Change("large", Op.PUT, b"large", name, text) for name in FIELDS),
        Change("value", Op.PUT, b"only:%d" % (number % 2), None, text),
        Change("value", Op.DELETE, b"only:%d" % ((number + 1) % 2)),
    ]
    return EpochChanges(number, 1, number + 1, list(runs_of(changes, [state.name for state in STATES])))


def assert_whole(snapshot: Snapshot) -> int:
    """Check that everything in a snapshot is of its epoch; return the epoch."""
    epoch = snapshot.applied.epoch
    text = b"%d" % epoch
    assert {snapshot.value(key) for key in KEYS} == {text}
    assert list(snapshot.map_pairs(b"small")) == [(b"a", text), (b"b", text)]
    assert set(snapshot.fields(b"large", FIELDS)) == {text}
    assert snapshot.map_size(b"large") == len(FIELDS)
    assert snapshot.value(b"only:%d" % (epoch % 2)) == text
    assert snapshot.key_info(b"only:%d" % ((epoch + 1) % 2)) is None
    cursor, count = 0, 0
    while True:
        cursor, found = snapshot.scan(cursor, 50)
        count += len(found)
        if not cursor:
            break
    assert count == snapshot.applied.key_count == len(KEYS) + 3
    return epoch


def read_until_the_last(folder: str) -> None:
    """Read in a process of its own, a snapshot after the other; print how many epochs were seen."""
    store = LmdbStore(folder, "g", is_reader=True)
    seen = []
    with store.snapshot(1) as snapshot:
        while not seen or seen[-1] < EPOCHS - 1:
            seen.append(assert_whole(snapshot))
            snapshot.renew(1)
    assert seen == sorted(seen)
    print(len(set(seen)))


def test_readers_in_other_processes_see_whole_epochs_only(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, "g")
    store.apply(epoch_of(0), STATES)
    readers = [
        subprocess.Popen([sys.executable, __file__, str(tmp_path)], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    for number in range(1, EPOCHS):
        store.apply(epoch_of(number), STATES)
        with store.snapshot(1) as snapshot:
            assert assert_whole(snapshot) == number
    seen = [int(reader.communicate(timeout=WAIT_S_MAX)[0]) for reader in readers]
    assert [reader.returncode for reader in readers] == [0, 0]
    assert min(seen) > 0
    store.close()


if __name__ == "__main__":
    read_until_the_last(sys.argv[1])
