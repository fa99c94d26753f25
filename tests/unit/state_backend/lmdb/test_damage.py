"""A store with a damaged file answers with an error, never with another value, and is rebuilt."""

from __future__ import annotations

import faulthandler
import os
import random
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

from state_backend.apply.applier import Applier
from state_backend.codec import packed_map
from state_backend.lmdb import store as lmdb_store
from state_backend.lmdb.damage import as_damage, check_length
from state_backend.lmdb.store import DATA, LmdbStore
from state_backend.log.change_log import ChangeLog
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import StoreDamagedError, StoreError
from state_backend.model.records import Change, Op
from state_backend.store.store import Snapshot
from tests.builders import apply_epoch

STATES = (
    StateDescriptor("temp", key="k", value="v"),
    StateDescriptor("trip", key="k", field="f", value="v"),
    StateDescriptor("best", key="k", member="m", score="s"),
    StateDescriptor("news", key="k", value="v", kind="list"),
)
VALUES = {b"job:temp:%d" % number: b"value %d" % number for number in range(800)} | {b"job:temp:long": bytes(200_000)}
FIELDS = {b"f%d" % number: b"%d" % number for number in range(packed_map.FIELDS_MAX + 40)}
MEMBERS = {b"m%03d" % number: float(number) for number in range(400)}
ELEMENTS = [b"element %d" % number for number in range(300)]
PAGE = 4096
RIGHT, WRONG, REFUSED = 0, 1, 2


def changes() -> Iterator[Change]:
    for key, value in VALUES.items():
        yield Change("temp", Op.PUT, key, None, value)
    for name, value in FIELDS.items():
        yield Change("trip", Op.PUT, b"job:trip:a", name, value)
    for member, score in MEMBERS.items():
        yield Change("best", Op.PUT, b"job:best:a", member, b"%d" % score)
    for element in ELEMENTS:
        yield Change("news", Op.APPEND, b"job:news:a", None, element)


def value_of(value: bytes) -> Change:
    return Change("temp", Op.PUT, b"job:temp:" + value, None, value)


def is_right(snapshot: Snapshot) -> bool:
    """Read everything, by name and in order; return whether it is right."""
    size = snapshot.list_size(b"job:news:a")
    return (
        {key: snapshot.value(key) for key in VALUES} == VALUES
        and dict(zip(FIELDS, snapshot.fields(b"job:trip:a", list(FIELDS)), strict=True)) == FIELDS
        and dict(snapshot.map_pairs(b"job:trip:a")) == FIELDS
        and dict(zip(MEMBERS, snapshot.scores(b"job:best:a", list(MEMBERS)), strict=True)) == MEMBERS
        and list(snapshot.sorted_members(b"job:best:a", 0, snapshot.sorted_size(b"job:best:a")))
        == list(MEMBERS.items())
        and list(snapshot.list_elements(b"job:news:a", 0, size)) == ELEMENTS
        and len(snapshot.scan(0, 100_000)[1]) == len(VALUES) + 3
    )


class Followed:
    """A log, its applier, and the events that this reported."""

    def __init__(self, folder: Path) -> None:
        self.log, self.folder = folder / "log", folder / "store"
        self.writer = LogWriter(self.log, "job", STATES, "q")
        self.writer.publish(changes())
        self.events: list[dict[str, Any]] = []
        self.applier = self.start()

    def start(self) -> Applier:
        self.applier = Applier(ChangeLog(self.log), "job", self.folder, self.events.append)
        return self.applier

    def settle(self) -> None:
        while self.applier.step():
            pass

    @property
    def store(self) -> LmdbStore:
        assert self.applier.store is not None
        return self.applier.store

    @property
    def data(self) -> Path:
        (folder,) = (path for path in (self.folder / "job").iterdir() if path.is_dir())
        return folder / DATA

    def is_right(self) -> bool:
        with self.store.snapshot(1) as snapshot:
            return is_right(snapshot)

    def names(self) -> list[str]:
        return [event["event"] for event in self.events]


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[Followed]:
    followed = Followed(tmp_path)
    followed.settle()
    yield followed
    followed.applier.close()


def flip(data: Path, at: int, bit: int) -> None:
    with open(data, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def damage_records(data: Path, needle: bytes) -> None:
    """Flip a bit in every copy of a text, wherever it lies in the file."""
    stored = data.read_bytes()
    at = stored.find(needle)
    assert at >= 0
    while at >= 0:
        flip(data, at, 0)
        at = stored.find(needle, at + 1)


def exit_code_of_child(work: Callable[[], int]) -> int:
    """Return the exit code of a process that does this work, or minus the signal that ended it."""
    pid = os.fork()
    if not pid:
        faulthandler.disable()
        try:
            os._exit(work())
        except Exception as error:
            is_told = isinstance(error, StoreError) or as_damage(error) is not None
            if not is_told:
                traceback.print_exc()
            os._exit(REFUSED if is_told else WRONG)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("flips", [20, pytest.param(2_000, marks=pytest.mark.slow)])
def test_verifying_store_survives_any_bit_flip(followed: Followed, tmp_path: Path, flips: int) -> None:
    """Of a file with a flipped bit either it is told, or every answer is right; a crash is told by the system."""
    followed.applier.close()
    source, other = followed.data.parent, tmp_path / "other"
    chosen = random.Random(7)
    size = followed.data.stat().st_size
    places = [chosen.randrange(size) for _ in range(flips * 6 // 10)]
    # Headers of pages and what lies first in them: there LMDB keeps how it finds the rest.
    places += [chosen.randrange(size // PAGE) * PAGE + chosen.randrange(40) for _ in range(flips * 4 // 10)]

    def verified_answers() -> int:
        store = LmdbStore(other, "q", is_reader=True)
        store.verify()
        with store.snapshot(1) as snapshot:
            return RIGHT if is_right(snapshot) else WRONG

    def any_answers() -> int:
        store = LmdbStore(other, "q", is_reader=True)
        with store.snapshot(1) as snapshot:
            return WRONG if any(snapshot.value(key) not in (value, None) for key, value in VALUES.items()) else RIGHT

    reported = 0
    for place in places:
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(source, other)
        flip(other / DATA, place, chosen.randrange(8))
        code = exit_code_of_child(verified_answers)
        assert code != WRONG, place
        assert exit_code_of_child(any_answers) != WRONG, place
        reported += code != RIGHT
    assert reported > flips // 12


def test_store_damaged_while_no_server_ran_is_rebuilt(followed: Followed) -> None:
    followed.applier.close()
    before = followed.data
    damage_records(before, b"value 77")
    followed.events.clear()
    followed.start()
    followed.settle()
    assert followed.names()[:2] == ["damaged", "open"]
    assert followed.events[1]["path"] != str(before.parent)
    assert not before.exists()
    assert followed.is_right()


@pytest.mark.parametrize("left", [0, 100, PAGE, 5 * PAGE, 5 * PAGE + 7])
def test_truncated_file_is_noticed_before_it_is_touched(followed: Followed, left: int) -> None:
    if left == 0:
        followed.applier.close()
    os.truncate(followed.data, left)
    if left == 0:
        followed.start()
    followed.events.clear()
    followed.settle()
    assert "damaged" in followed.names() or left == 0
    assert followed.is_right()


def test_damage_found_by_reader_has_store_verified_and_rebuilt(followed: Followed) -> None:
    reader = LmdbStore.__new__(LmdbStore)  # as in another process: LMDB forbids to open a folder twice in one
    reader.path = followed.store.path
    damage_records(followed.data, b"value 77")
    with followed.store.snapshot(1) as snapshot:
        assert snapshot.value(b"job:temp:76") == b"value 76"
        with pytest.raises(StoreDamagedError, match="checksum"):
            snapshot.value(b"job:temp:77")
    followed.events.clear()
    reader.suspect()
    followed.settle()
    assert followed.names()[:2] == ["damaged", "open"]
    assert followed.is_right()


def test_suspicion_that_is_not_confirmed_changes_nothing_once(followed: Followed) -> None:
    followed.events.clear()
    followed.store.suspect()
    followed.settle()
    assert (followed.names(), followed.store.is_suspect) == ([], False)
    followed.store.suspect()
    followed.settle()
    assert followed.names()[:2] == ["damaged", "open"]
    assert followed.is_right()


def test_epoch_does_not_build_on_damaged_record(followed: Followed) -> None:
    before = followed.data
    damage_records(before, b"element 299")
    followed.writer.publish([Change("news", Op.APPEND, b"job:news:a", None, b"element 300")])
    followed.settle()
    with followed.store.snapshot(1) as snapshot:
        assert list(snapshot.list_elements(b"job:news:a", 299, 301)) == [b"element 299", b"element 300"]
    assert "damaged" in followed.names()


def test_no_store_is_trusted_after_crash(followed: Followed) -> None:
    before = followed.data
    followed.applier.close()
    followed.start()
    followed.applier.delete_all_stores()
    followed.settle()
    assert not before.exists()
    assert followed.is_right()


def test_store_of_other_process_needs_boot_id(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    followed.applier.close()
    monkeypatch.setattr(lmdb_store, "_boot_id", lambda: "")
    opened = LmdbStore(followed.data.parent, "q")
    assert opened.applied.epoch == -1  # the one before is of a process that could tell its boot
    opened.close()
    followed.start()
    followed.settle()
    followed.applier.close()
    again = LmdbStore(followed.data.parent, "q")
    assert again.applied.epoch == 0  # it was written by this very process
    again.close()
    monkeypatch.setattr(lmdb_store, "THIS_PROCESS", "process of another id")
    later = LmdbStore(followed.data.parent, "q")
    assert later.applied.epoch == -1
    later.close()


def test_file_size_equals_its_pages_after_each_epoch(followed: Followed) -> None:
    """LMDB leaves out pages at the end that a transaction used and freed again."""
    for number in range(30):
        many = [Change("temp", Op.PUT, b"job:temp:x%d" % each, None, bytes(3000)) for each in range(number * 7)]
        gone = [Change("temp", Op.DELETE, each.key) for each in many]
        followed.writer.publish([*many, *gone])
        followed.settle()
        followed.store.check_length()
    assert "damaged" not in followed.names()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (lmdb.CorruptedError("x"), "x; the store is rebuilt from the log, retry in a moment"),
        (StoreDamagedError("y"), "y"),
        (lmdb.MapFullError("x"), None),
        (ValueError("x"), None),
    ],
)
def test_error_distinguishes_damaged_file(error: Exception, text: str | None) -> None:
    """A server has a store verified after such an error, and asks its client to retry."""
    damage = as_damage(error)
    assert (None if damage is None else str(damage)) == text


def test_file_has_all_pages_that_it_counts(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path / "store", "g")
    apply_epoch(store, STATES, [value_of(b"%d" % n) for n in range(1000)], 0)
    store.close()
    path = tmp_path / "store" / "data.mdb"
    check_length(path)
    check_length(tmp_path / "none")
    (tmp_path / "empty").touch()
    check_length(tmp_path / "empty")
    size = path.stat().st_size
    for length in (size - 1, size - PAGE, PAGE + 10, PAGE, 10):
        os.truncate(path, length)
        with pytest.raises(StoreDamagedError, match=rf"data\.mdb has {length} bytes, but its pages need (\d+|more)$"):
            check_length(path)


@pytest.mark.parametrize(
    ("table", "place", "problem"),
    [
        ("keys", lambda at: bytes([at[0] ^ 1]) + at[1:], "a record is not at its key's or field's position"),
        ("keys", lambda at: at + b"\0\2", "an ordinal is missing"),
        ("fields", lambda at: at[:-1] + bytes([at[-1] ^ 1]), "a record is not at its key's or field's position"),
        ("fields", lambda at: at + b"\0\3", "an ordinal is missing"),
    ],
)
def test_misplaced_record_is_damage(tmp_path: Path, table: str, place: Callable[[bytes], bytes], problem: str) -> None:
    """A bit of a row's name is not covered by the checksum of its value."""
    store = LmdbStore(tmp_path / "store", "g")
    fields = [Change("trip", Op.PUT, b"k", b"f%d" % n, b"v", 10**15) for n in range(300)]
    changes = [*(value_of(b"%d" % n) for n in range(600)), *fields]
    apply_epoch(store, STATES, changes, 0)
    store.verify()
    rows = getattr(store.tables, table)
    with store._write_transaction() as txn, txn.cursor(db=rows) as cursor:
        cursor.first()
        for _ in range(270):  # not in the first portion of rows
            cursor.next()
        at, record = cursor.item()
        txn.put(place(at), record, db=rows)
    with pytest.raises(StoreDamagedError, match=f"^the table of {table} is damaged: {problem}$"):
        store.verify()
    store.close()


def test_keys_of_one_position_are_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("state_backend.model.slots.crc32", lambda text: 7)
    store = LmdbStore(tmp_path / "store", "g")
    keys = [b"{tag}%d" % number for number in range(300)]
    changes = [Change("temp", Op.PUT, key, None, b"v") for key in keys]
    apply_epoch(store, STATES, changes, 0)
    store.verify()
    with store.snapshot(1) as snapshot:
        assert [snapshot.value(key) for key in keys] == [b"v"] * 300
    gone = [Change("temp", Op.DELETE, key) for key in keys[::2]]
    apply_epoch(store, STATES, gone, 1)
    store.verify()
    with store.snapshot(1) as snapshot:
        assert [snapshot.value(key) for key in keys] == [None, b"v"] * 150
    store.close()


def test_value_that_is_not_that_of_its_checksum_is_damage(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path / "store", "g")
    apply_epoch(store, STATES, [value_of(b"%d" % n) for n in range(600)], 0)
    with store._write_transaction() as txn, txn.cursor(db=store.tables.keys) as cursor:
        cursor.last()
        at, record = cursor.item()
        txn.put(at, record[:-1] + bytes([record[-1] ^ 1]), db=store.tables.keys)
    with pytest.raises(StoreDamagedError, match=r"^the table of keys is damaged: a checksum does not match$"):
        store.verify()
    store.close()
