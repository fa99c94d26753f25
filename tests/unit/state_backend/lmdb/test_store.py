"""What only the LMDB store can do wrong: folders, readers in other processes, sizes, room, and its expiry index."""

from __future__ import annotations

import random
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import product
from pathlib import Path

import lmdb
import pytest

from compat.waiting import WAIT_S_MAX
from state_backend.codec import packed_map
from state_backend.lmdb.record_format import PIECE_BYTES, Tables, name_of
from state_backend.lmdb.snapshot import LmdbSnapshot
from state_backend.lmdb.store import LOCK_BYTES, LmdbStore
from state_backend.model.descriptor import Kind, StateDescriptor
from state_backend.model.errors import KeyConflictError, StoreError, StoreFullError
from state_backend.model.records import Change, Op
from state_backend.model.slot_set import ALL, SlotSet
from state_backend.model.slots import slot_of
from state_backend.store.changed_keys import EXPIRY_BATCHES_MAX
from state_backend.store.slot_ownership import Loading, SlotOwnership
from state_backend.store.store import EpochChanges, LongValue
from tests.builders import epoch_of as epoch_of_states
from tests.builders import put_value

STATES = (
    StateDescriptor("temp", key="k", value="v").for_job("job"),
    StateDescriptor("city", key="k", field="f", value="v").for_job("job"),
)
NAMES = [state.name for state in STATES]


def epoch_of(number: int, changes: Iterable[Change], clock_ms: int = 1) -> EpochChanges:
    return epoch_of_states(STATES, changes, number, clock_ms=clock_ms)


def pass_time(store: LmdbStore, clock_ms: int) -> None:
    """Apply an epoch without changes: the log's clock moves on."""
    store.apply(epoch_of(store.applied.epoch + 1, [], clock_ms), STATES)


put = partial(put_value, "temp")


def put_city(name: bytes, expire_at_ms: int | None = None, key: bytes = b"map") -> Change:
    return Change("city", Op.PUT, key, name, b"v", expire_at_ms)


def lines_of_expiry(store: LmdbStore) -> int:
    return entries(store, "expiry")


def entries(store: LmdbStore, table: str) -> int:
    with store.begin() as txn:
        return int(txn.stat(getattr(store.tables, table))["entries"])


def rows_of_dues(store: LmdbStore) -> int:
    return entries(store, "field_expiry")


def in_another_process(code: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        check=True,
        capture_output=True,
        text=True,
        timeout=WAIT_S_MAX,
    )
    return done.stdout.strip()


# Sizes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [b"", b"\x00", b"\xff\xfe", b"k" * 65_536])
def test_any_key_can_be_stored(tmp_path: Path, key: bytes) -> None:
    store = LmdbStore(tmp_path, "g")
    store.apply(epoch_of(0, [put(key, b"value")]), STATES)
    with store.snapshot(1) as snapshot:
        assert snapshot.value(key) == b"value"
        assert snapshot.scan(0, 10)[1] == [key]
    store.apply(epoch_of(1, [Change("temp", Op.DELETE, key)]), STATES)
    assert store.applied.key_count == 0
    store.close()


def test_value_of_64_mib_and_field_of_any_name_can_be_stored(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, "g")
    value = b"\x01" * (64 << 20)
    store.apply(epoch_of(0, [put(b"k", value), put_city(b""), put_city(b"f" * 65_536)]), STATES)
    with store.snapshot(1) as snapshot:
        assert snapshot.value(b"k") == value
        assert snapshot.fields(b"map", [b"", b"f" * 65_536, b"f"]) == [b"v", b"v", None]
    store.close()


# Folders and readers --------------------------------------------------------------------------------------------------


def test_reader_of_missing_folder_gets_sparkis_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nothing"):
        LmdbStore(tmp_path / "nothing", "g", is_reader=True)


def test_reader_of_folder_without_tables_may_try_again(tmp_path: Path) -> None:
    lmdb.open(str(tmp_path)).close()
    for _ in range(2):
        with pytest.raises(StoreError, match="cannot be used"):
            LmdbStore(tmp_path, "g", is_reader=True)
    LmdbStore(tmp_path, "g").close()
    LmdbStore(tmp_path, "g", is_reader=True).close()


def test_error_of_lmdb_is_store_error(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, "g")
    store.close()
    for use in (store.clear_stale_readers, store.verify, store.used_bytes, store.begin):
        with pytest.raises(StoreError, match="closed"):
            use()


def test_reader_in_another_process_sees_each_new_epoch(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, "g")
    code = """
import sys
from state_backend.lmdb.store import LmdbStore
with LmdbStore(sys.argv[1], "g", is_reader=True).snapshot(1) as snapshot:
    print(snapshot.applied.epoch, snapshot.value(b"k").decode())
"""
    for number in range(2):
        store.apply(epoch_of(number, [put(b"k", b"v%d" % number)]), STATES)
        assert in_another_process(code, tmp_path) == f"{number} v{number}"
    store.close()


def test_reader_keeps_its_store_when_folder_is_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    LmdbStore(folder, "g").close()
    store = LmdbStore(folder, "g")
    store.apply(epoch_of(0, [put(b"k", b"old")]), STATES)
    store.close()
    reader = LmdbStore(folder, "g", is_reader=True)
    (folder / "boot").write_text("another boot")
    in_another_process(
        "import sys; from state_backend.lmdb.store import LmdbStore; LmdbStore(sys.argv[1], 'g')", folder
    )
    with reader.snapshot(1) as snapshot:
        assert snapshot.value(b"k") == b"old"
    reader.close()
    with LmdbStore(folder, "g", is_reader=True).snapshot(1) as snapshot:
        assert snapshot.value(b"k") is None


@pytest.mark.parametrize("mark", ["", "1 another boot", None])
def test_store_from_before_last_boot_is_discarded(tmp_path: Path, mark: str | None) -> None:
    store = LmdbStore(tmp_path / "store", "g")
    store.apply(epoch_of(0, [put(b"k")]), STATES)
    store.close()
    boot = tmp_path / "store" / "boot"
    boot.unlink() if mark is None else boot.write_text(mark)
    store = LmdbStore(tmp_path / "store", "g")
    assert store.applied.epoch == -1
    store.close()


def test_lock_file_that_was_left_over_does_not_matter(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from state_backend.lmdb.store import LmdbStore
store = LmdbStore(sys.argv[1], "g")
held = store._env.begin(write=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=WAIT_S_MAX)
    assert killed.returncode == -signal.SIGKILL
    store = LmdbStore(tmp_path, "g")
    store.apply(epoch_of(0, [put(b"k")]), STATES)
    assert store.applied.epoch == 0
    store.close()


def test_copy_has_all_keys_without_free_pages(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path / "one", "g")
    store.apply(epoch_of(0, [put(b"%d" % number, b"x" * 1000) for number in range(2000)]), STATES)
    store.apply(epoch_of(1, [Change("temp", Op.DELETE, b"%d" % number) for number in range(1990)]), STATES)
    used, free = store.used_bytes()
    assert free > 10 * used
    store.copy_to(tmp_path / "two")
    copy = LmdbStore(tmp_path / "two", "g")
    assert copy.applied == store.applied
    assert copy.used_bytes()[1] < used
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    copy.close()
    store.close()


# Room -----------------------------------------------------------------------------------------------------------------


def test_full_map_is_error_and_last_whole_epoch_stays(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, "g", map_bytes_max=1 << 20)
    store.apply(epoch_of(0, [put(b"k", b"old")]), STATES)
    big = [put(b"%d" % number, b"x" * 1000) for number in range(2000)]
    for _ in range(3):
        with pytest.raises(StoreFullError, match="free space"):
            store.apply(epoch_of(1, [put(b"k", b"new"), *big]), STATES)
        with store.snapshot(1) as snapshot:
            assert (snapshot.applied.epoch, snapshot.value(b"k"), snapshot.applied.key_count) == (0, b"old", 1)
    store.apply(epoch_of(1, [put(b"k", b"new")]), STATES)
    store.close()
    store = LmdbStore(tmp_path, "g", map_bytes_max=1 << 26)
    store.apply(epoch_of(2, big), STATES)
    assert store.applied.key_count == 2001
    store.close()


def test_full_disk_is_error_and_store_continues_when_there_is_room(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: LMDB's write fails in the same place."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = LmdbStore(tmp_path, "g")
    store.apply(epoch_of(0, [put(b"k", b"old")]), STATES)
    big = epoch_of(1, [put(b"k", b"new"), *(put(b"%d" % number, b"x" * 1000) for number in range(2000))])
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, most))
    try:
        with pytest.raises(StoreFullError, match="free space"):
            store.apply(big, STATES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    store.close()
    store = LmdbStore(tmp_path, "g")
    with store.snapshot(1) as snapshot:
        assert (snapshot.applied.epoch, snapshot.value(b"k")) == (0, b"old")
    store.apply(big, STATES)
    assert store.applied.key_count == 2001
    store.close()


def test_opening_store_again_writes_nothing_that_full_disk_could_break(tmp_path: Path) -> None:
    LmdbStore(tmp_path, "g").close()
    before = (tmp_path / "boot").stat().st_mtime_ns
    LmdbStore(tmp_path, "g").close()
    assert (tmp_path / "boot").stat().st_mtime_ns == before


def test_lock_file_has_its_room_before_it_is_mapped(tmp_path: Path) -> None:
    LmdbStore(tmp_path / "one", "g").close()
    store = LmdbStore(tmp_path / "one", "g")
    store.copy_to(tmp_path / "two")
    LmdbStore(tmp_path / "two", "g").close()
    store.close()
    for name in ("one", "two"):
        assert (tmp_path / name / "lock.mdb").stat().st_size == LOCK_BYTES


# Conflicts and undeclared states --------------------------------------------------------------------------------------


@pytest.mark.parametrize("expire_at_ms", [0, -1])
def test_key_that_expired_before_1970_is_absent(tmp_path: Path, expire_at_ms: int) -> None:
    store = LmdbStore(tmp_path, "q")
    changes = [put(b"value", expire_at_ms=expire_at_ms), put_city(b"a", expire_at_ms), put_city(b"b")]
    store.apply(epoch_of(0, changes, clock_ms=10), STATES)
    with store.snapshot(10) as snapshot:
        assert snapshot.value(b"value") is None
        assert snapshot.fields(b"map", [b"a", b"b"]) == [None, b"v"]
    store.close()


def test_key_conflict_changes_nothing(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, "g")
    store.apply(epoch_of(0, [put(b"a")]), STATES)
    with pytest.raises(KeyConflictError, match="'temp' and 'city' both made the key b'a'"):
        store.apply(epoch_of(1, [put(b"b"), put_city(b"f", key=b"a")]), STATES)
    assert (store.applied.epoch, store.applied.keys) == (0, {"temp": 1})
    store.close()


def test_change_of_undeclared_state_is_refused_by_name(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, "g")
    with pytest.raises(StoreError, match="'temp'"):
        store.apply(epoch_of(0, [put(b"a")]), STATES[1:])
    store.close()


# The expiry index -----------------------------------------------------------------------------------------------------


def test_expiry_index_is_empty_again_when_everything_expired_or_was_deleted(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, "g")
    many = [put_city(b"%d" % number, 100 + number % 3) for number in range(packed_map.FIELDS_MAX + 10)]
    store.apply(epoch_of(0, [put(b"a", expire_at_ms=100), put(b"b", expire_at_ms=200), *many]), STATES)
    store.apply(epoch_of(1, [put(b"a", expire_at_ms=300), Change("temp", Op.DELETE, b"b"), put(b"c")]), STATES)
    assert (lines_of_expiry(store), rows_of_dues(store)) == (2, len(many))
    assert (store.applied.expiring, store.applied.expiring_maps) == (1, 1)
    pass_time(store, 150)
    assert store.expire(150, 1 << 20) >= len(many)
    assert (lines_of_expiry(store), rows_of_dues(store), store.applied.expired_keys) == (1, 0, 1)
    assert (store.applied.expiring_maps, store.applied.expired_fields) == (0, len(many))
    assert store.expire(300, 1 << 20) == 1  # it is noted, and stays for the log's clock
    assert (lines_of_expiry(store), store.applied.keys, store.applied.expiring) == (1, {"temp": 1}, 0)
    pass_time(store, 300)
    assert store.expire(0, 1 << 20) == 1
    assert (lines_of_expiry(store), store.applied.keys, store.applied.expiring) == (0, {"temp": 1}, 0)
    store.close()


def test_rows_of_deleted_key_are_removed_in_bounded_batches(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, "g")
    long = put(b"long", b"x" * (3 * PIECE_BYTES + 1))
    store.apply(epoch_of(0, [*(put_city(b"%d" % number, 100) for number in range(50)), long]), STATES)
    assert (entries(store, "fields"), rows_of_dues(store), entries(store, "blocks")) == (50, 50, 4)
    store.apply(epoch_of(1, [Change("city", Op.CLEAR, b"map"), Change("temp", Op.DELETE, b"long")]), STATES)
    removed = []
    while not removed or removed[-1] >= 20:
        removed.append(store.expire(1, 20))
    assert (removed[:5], sum(removed)) == ([20, 20, 20, 20, 20], 104)
    assert [entries(store, table) for table in Tables._fields if table != "meta"] == [0] * 7
    assert (store.applied.key_count, store.applied.expired_keys) == (0, 0)
    store.close()


def test_large_expired_map_is_removed_in_bounded_steps_and_reads_as_missing(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, "g")
    fields = [put_city(b"%d" % number, 100 + number) for number in range(500)]
    store.apply(epoch_of(0, [*fields, put_city(b"last")]), STATES)
    pass_time(store, 499)
    sizes = []
    for _ in range(4):
        with store.snapshot(499) as snapshot:
            sizes.append((snapshot.map_size(b"map"), len(list(snapshot.map_pairs(b"map")))))
        store.expire(499, 150)
    assert sizes == [(101, 101)] * 4
    assert (entries(store, "fields"), rows_of_dues(store), lines_of_expiry(store)) == (101, 100, 2)
    assert (store.applied.expiring_maps, store.applied.expired_fields) == (1, 400)
    store.close()


def test_field_that_no_longer_expires_leaves_nothing_in_indices(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, "g")
    store.apply(epoch_of(0, [put_city(b"%d" % number, 100) for number in range(5)]), STATES)
    store.apply(epoch_of(1, [put_city(b"%d" % number) for number in range(5)]), STATES)
    assert (rows_of_dues(store), lines_of_expiry(store)) == (0, 0)
    with store.snapshot(1000) as snapshot:
        assert list(snapshot.map_sizes(b"map")) == [5]
    store.close()


# Long values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES, 3 * PIECE_BYTES - 1])
def test_any_part_of_long_value_can_be_read(tmp_path: Path, length: int) -> None:
    store = LmdbStore(tmp_path, "g")
    value = bytes(number % 251 for number in range(length))
    store.apply(epoch_of(0, [put(b"k", value), put_city(b"f", 100)._replace(value=value)]), STATES)
    with store.snapshot(1) as snapshot:
        assert (snapshot.value(b"k"), snapshot.field(b"map", b"f")) == (value, value)
        text = snapshot.lazy_value(b"k")
        if length > PIECE_BYTES:
            assert isinstance(text, LongValue)
            for start in (0, 1, PIECE_BYTES - 1, PIECE_BYTES, length - 1):
                for stop in (start, start + 1, min(length, start + PIECE_BYTES), length):
                    parts = list(text.chunks(start, stop))
                    assert b"".join(parts) == value[start:stop]
                    assert all(0 < len(part) <= PIECE_BYTES for part in parts)
    store.close()


def test_long_value_that_is_put_again_is_not_written_again(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, "g")
    value = b"x" * (3 * PIECE_BYTES)
    assert store.apply(epoch_of(0, [put(b"k", value)]), STATES) == 1
    assert store.apply(epoch_of(1, [put(b"k", value)]), STATES) == 0
    assert store.apply(epoch_of(2, [put(b"k", value, 100)]), STATES) == 1
    assert (entries(store, "blocks"), lines_of_expiry(store)) == (3, 1)
    assert store.apply(epoch_of(3, [put(b"k", value[:-1] + b"y")]), STATES) == 1
    assert (entries(store, "blocks"), lines_of_expiry(store)) == (6, 1)
    assert store.expire(1, 100) == 3
    assert (entries(store, "blocks"), lines_of_expiry(store)) == (3, 0)
    store.close()


def test_scan_step_ends_early_among_expired_keys(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, "g")
    keys = [put(b"%d" % number, expire_at_ms=100 + number % 2) for number in range(5000)]
    fields = [put_city(b"%d" % number, 100 + number % 2) for number in range(5000)]
    store.apply(epoch_of(0, [*keys, *fields, put_city(b"live")]), STATES)
    with store.snapshot(200) as snapshot:
        for scan in (snapshot.scan, lambda cursor, count: snapshot.scan_map(b"map", cursor, count)):
            steps = [scan(0, 10)]
            while steps[-1][0]:
                steps.append(scan(steps[-1][0], 10))
            assert sorted(len(found) for _, found in steps) == [0, 0, 0, 0, 1]
        assert [len(list(snapshot.map_sizes(b"map"))), snapshot.map_size(b"map")] == [6, 1]
        assert set(snapshot.random_keys()) == {None, b"map"}
    store.close()


def test_scan_step_ends_early_among_long_records(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, "g")
    values = [put(b"%d" % number, bytes(PIECE_BYTES)) for number in range(100)]
    fields = [put_city(b"%d" % number)._replace(value=bytes(PIECE_BYTES)) for number in range(100)]
    store.apply(epoch_of(0, [*values, *fields]), STATES)
    with store.snapshot(1) as snapshot:
        for cursor, found in (snapshot.scan(0, 4096), snapshot.scan_map(b"map", 0, 4096)):
            assert cursor
            assert 0 < len(found) < 40
    store.close()


@pytest.mark.compiled
def test_compiled_scan_step_equals_python(tmp_path: Path) -> None:
    dice = random.Random(1)
    store = LmdbStore(tmp_path, "g")
    values = [put(b"key:%d" % number, dice.randbytes(30), dice.choice((None, None, 50, 150))) for number in range(6000)]
    values += [put(b"long:%d" % number, dice.randbytes(dice.choice((5_000, 200_000)))) for number in range(60)]
    fields = [put_city(b"f%d" % each, 90 + each, b"map:%d" % number) for number in range(40) for each in range(3)]
    fields += [put_city(b"f", None, b"small:%d" % number) for number in range(500)]
    store.apply(epoch_of(0, [*values, *fields]), STATES)
    scanned = Counter[str]()
    for owned in (ALL, SlotSet.parse("0-5,100-8000,9000,16383")):
        store.own(owned)
        # At the second time some keys and fields have expired, at the third the maps as wholes.
        for now_ms, count, kinds, only_expiring in product(
            (1, 91, 1000), (1, 100, 1000), (None, [Kind.MAP], []), (False, True)
        ):
            python = LmdbSnapshot(store.begin, store.tables, "g", now_ms, store._env, None)
            with store.snapshot(now_ms) as compiled, python:
                assert compiled.pages is not None and python.pages is None
                cursor = dice.choice((0, 1 << 40))
                for _ in range(60):
                    step = compiled.scan(cursor, count, kinds, only_expiring=only_expiring)
                    assert step == python.scan(cursor, count, kinds, only_expiring=only_expiring)
                    scanned[now_ms, str(kinds)] += len(step[1])
                    cursor = step[0]
                    if not cursor:
                        break
    assert all(number > 1000 for (_, kinds), number in scanned.items() if kinds != "[]"), scanned


def test_keys_that_expired_first_are_removed_first(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, "g")
    store.apply(epoch_of(0, [put(b"%d" % number, expire_at_ms=100 + number) for number in range(10)]), STATES)
    pass_time(store, 1000)
    assert [store.expire(1000, 4) for _ in range(4)] == [4] * 4  # ten are noted, and six of them removed
    with store.begin() as txn, txn.cursor(db=store.tables.keys) as cursor:
        assert sorted(map(name_of, cursor.iternext(keys=False))) == [b"%d" % number for number in range(6, 10)]
    store.close()


def test_time_before_1970_is_in_past(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, "g")
    store.apply(epoch_of(0, [put(b"a", expire_at_ms=0), put(b"b", expire_at_ms=-5)]), STATES)
    with store.snapshot(10) as snapshot:
        assert (snapshot.value(b"a"), snapshot.value(b"b")) == (None, None)
    assert store.expire(10, 10) == 4  # noted and removed: the log's clock is behind them, too
    store.close()


def test_closed_snapshot_lets_pages_be_used_again(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, "g")
    for number in range(60):
        with store.snapshot(1):
            store.apply(epoch_of(number, [put(b"%d" % key, b"x" * 1000) for key in range(100)]), STATES)
    used, free = store.used_bytes()
    assert free < 5 * used
    store.close()


def test_unused_reader_closes_its_file(tmp_path: Path) -> None:
    code = """
import os, shutil, sys, time
from pathlib import Path
from state_backend.lmdb.store import LmdbStore

def is_open():
    return any("data.mdb" in behind(each) for each in range(100))

def behind(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # it is not open, or no more: it may be closed at any moment
        return ""

store = LmdbStore(sys.argv[1], "g", is_reader=True)
snapshot = store.snapshot(1)
del store
shutil.rmtree(sys.argv[1])
print(is_open(), snapshot.value(b"k").decode())
del snapshot
ends = time.monotonic() + 300
while is_open() and time.monotonic() < ends:
    time.sleep(0.001)
print(is_open())
"""
    store = LmdbStore(tmp_path / "store", "g")
    store.apply(epoch_of(0, [put(b"k", b"v")]), STATES)
    store.close()
    assert in_another_process(code, tmp_path / "store").split() == ["True", "v", "False"]


def test_store_that_has_nothing_to_expire_is_not_written(tmp_path: Path) -> None:
    """The applier calls `expire` all the time; a write would end what readers have cached."""
    store = LmdbStore(tmp_path, "g")
    changes = [put(b"soon", expire_at_ms=100), put(b"late", expire_at_ms=10_000), put_city(b"f", 20_000)]
    store.apply(epoch_of(0, changes), STATES)

    def version() -> int:
        with store.snapshot(1) as snapshot:
            return int(snapshot.version)

    before = version()
    for now_ms in (1, 50, 99):
        assert store.expire(now_ms, 10) == 0
    assert version() == before
    assert store.expire(100, 10) > 0
    announced = version()
    assert announced != before
    for now_ms in (100, 5_000, 9_999, 5_100):  # a clock that is set back a little
        assert store.expire(now_ms, 10) == 0
    assert version() == announced
    store.close()


def test_clock_that_is_set_back_counts_announced_keys_again(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, "g")
    store.apply(epoch_of(0, [put(b"%d" % at, expire_at_ms=at) for at in (50_000, 60_000, 70_000)]), STATES)
    for now_ms, count in ((40_000, 3), (61_000, 1), (57_000, 1), (50_500, 2), (40_000, 3), (80_000, 0), (1, 3)):
        while store.expire(now_ms, 10):
            pass
        assert store.applied.key_count == count, now_ms
    store.close()


def test_expired_keys_are_listed_by_batches_since_readers(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, "g")
    store.apply(epoch_of(0, [put(b"%d" % at, expire_at_ms=at) for at in (100, 200, 300)]), STATES)
    for now_ms in (100, 200, 300):
        store.expire(now_ms, 10)
    with store.snapshot(1) as snapshot:
        assert snapshot.applied.expiry_batches == 3
        expired = [snapshot.expired_since(batches) for batches in range(5)]
    assert expired[0] is not None and sorted(expired[0]) == [b"100", b"200", b"300"]
    assert expired[1:] == [[b"200", b"300"], [b"300"], [], None]
    store.close()


def test_oldest_batches_of_expired_keys_are_removed(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, "g")
    times = range(100, 100 + 3 * EXPIRY_BATCHES_MAX)
    store.apply(epoch_of(0, [put(b"%d" % at, expire_at_ms=at) for at in times]), STATES)
    sizes = set()
    for at in times:
        store.expire(at, 1)
        sizes.add(entries(store, "meta"))
    assert store.applied.expiry_batches == len(times)
    assert len(sizes) <= EXPIRY_BATCHES_MAX
    store.close()


def test_keys_of_slots_that_were_given_up_are_not_scanned(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, "g")
    keys = [b"key:%d" % number for number in range(200)]
    store.apply(epoch_of(0, map(put, keys)), STATES)
    low = SlotSet(((0, 8191),))
    store.own(low)
    with store.snapshot(1) as snapshot:
        assert sorted(snapshot.scan(0, 1000)[1]) == sorted(key for key in keys if slot_of(key) in low)
    store.close()


def test_replaced_state_has_only_keys_of_its_epoch(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, "g")
    low = SlotSet(((0, 8191),))
    store.own(low)
    keys = [key for key in (b"key:%d" % number for number in range(200)) if slot_of(key) in low]
    store.apply(epoch_of(0, map(put, keys)), STATES)
    store.apply(epoch_of(1, [put(keys[0])])._replace(replaces=frozenset({"temp"})), STATES)
    assert store.applied.key_count == 1
    with store.snapshot(1) as snapshot:
        assert snapshot.scan(0, 1000) == (0, [keys[0]])
    store.close()


def test_restarted_loading_of_slots_removes_them_first(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, "g")
    low, high = SlotSet(((0, 8191),)), SlotSet(((8192, 16383),))
    store.own(low)
    store.apply(epoch_of(0, []), STATES)
    assert store.own(ALL).loading == Loading(high)
    keys = [key for key in (b"key:%d" % number for number in range(200)) if slot_of(key) in high]
    store.load(epoch_of(0, map(put, keys)), STATES, Loading(high, snapshot=0, runs=1))
    store.restart_loading()
    assert store.own(ALL) == SlotOwnership(low, None, high, store.slot_ownership.changed_at)
    while store.remove_given_up(50):
        pass
    assert store.own(ALL).loading == Loading(high)
    store.close()
