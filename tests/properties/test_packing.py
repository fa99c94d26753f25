"""Values and maps that the compiled core packs make, byte for byte, the store that the general path makes of them."""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compat.examples import examples
from state_backend import native
from state_backend.codec import packed_map
from state_backend.codec.checksums import checked
from state_backend.lmdb.events import EVENTS
from state_backend.lmdb.record_format import SLOT_COUNT, SMALL_MAP, TABLES, VALUE, changed_name, make_record, name_of
from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import SparkisError
from state_backend.model.records import Change, Op, positions_in, runs_of
from state_backend.model.slot_set import ALL, SlotSet
from state_backend.model.slots import POSITION_BYTES
from state_backend.store import changed_keys, key_events
from state_backend.store.store import EpochChanges

if TYPE_CHECKING:
    from state_backend.native.packing import Packing

pytestmark = pytest.mark.compiled

STATES = (
    StateDescriptor("one", key="k", value="v").for_job("job"),
    StateDescriptor("two", key="k", value="v").for_job("job"),
    StateDescriptor("sum", key="k", value="v", reduce="sum", columns={"v": "bigint"}).for_job("job"),
    StateDescriptor("map", key="k", field="f", value="v").for_job("job"),
)
NAMES = [state.name for state in STATES]
# More than a look-up's lanes, so that a page of the tree is searched on; with and without hash tags, one of two states.
KEYS = {name: (b"", *(b"%s:{%d}%d" % (name.encode(), number % 7, number) for number in range(150))) for name in NAMES}
VALUES = st.sampled_from((b"", b"1", b"22", b"v" * 100, b"long" * 300))
# Also empty ones, which delete, and those that are too large for one record (see the limits that the test sets).
MAPS = st.dictionaries(st.sampled_from((b"f", b"g", b"h", b"i", b"j")), VALUES).map(
    lambda m: packed_map.pack(m.items())
)


def changes_of(state: str) -> st.SearchStrategy[Change]:
    keys, expiries = st.sampled_from(KEYS[state][state != "one" :]), st.sampled_from((None, None, None, 5, 5_000))
    name, nothing = st.just(state), st.none()
    if state == "map":
        fields = st.sampled_from((b"f", b"g"))
        one = st.builds(Change, name, st.just(Op.PUT), keys, fields, VALUES, expiries)
        full = st.builds(Change, name, st.just(Op.PUT), keys, nothing, MAPS, expiries)
        return one | full | full | st.builds(Change, name, st.just(Op.DELETE), keys, fields | nothing, nothing, nothing)
    if state == "sum":
        return st.builds(Change, name, st.just(Op.FOLD), keys, nothing, st.sampled_from((b"1", b"22")), nothing)
    puts = st.builds(Change, name, st.just(Op.PUT), keys, nothing, VALUES, expiries)
    return puts | puts | puts | st.builds(Change, name, st.just(Op.DELETE), keys, nothing, nothing, nothing)


# Many plain rows, and a few others among them.
plain = st.builds(
    lambda state, first, count, value: [
        Change(state, Op.PUT, key, None, value + b"%d" % number)
        for number, key in enumerate(KEYS[state][1 + first : 1 + first + count])
    ],
    st.sampled_from(("one", "two")),
    st.integers(0, 149),
    st.integers(0, 150),
    VALUES,
) | st.builds(
    lambda first, count, value: [
        Change("map", Op.PUT, key, None, packed_map.pack([(b"f", b"%d" % number), (b"g", value)]))
        for number, key in enumerate(KEYS["map"][1 + first : 1 + first + count])
    ],
    st.integers(0, 149),
    st.integers(0, 150),
    VALUES,
)
epochs = st.lists(
    plain | st.sampled_from(NAMES).flatmap(lambda state: st.lists(changes_of(state), min_size=1, max_size=3)),
    max_size=12,
)


def content_of(store: LmdbStore) -> dict[bytes, Any]:
    """All that is in a store. What is noted of an epoch, or counted, has an order of its own in each."""
    found: dict[bytes, Any] = {}
    happened: defaultdict[bytes, bytes] = defaultdict(bytes)
    with store.begin() as txn:
        for name, table in zip(TABLES, store.tables, strict=True):
            if name != b"meta":
                found[name] = list(txn.cursor(db=table))
        for name, stored in txn.cursor(db=store.tables.meta):
            value = checked(stored) if stored else stored
            if name.startswith(b"changed"):
                found[name] = value and sorted(changed_keys.unpack(value))
            elif name.startswith(b"slot"):
                found[name] = sorted(SLOT_COUNT.iter_unpack(value))
            elif name == b"applied":
                found[name] = json.loads(value)
            elif name != EVENTS:
                for key, what in key_events.unpack(value).events:
                    happened[key] += what
    return found | {EVENTS: happened}


def keys_in(content: dict[bytes, Any], name: bytes) -> set[bytes]:
    """Return the keys that an epoch changed."""
    return set(content.get(name) or ())


def records_of(content: dict[bytes, Any], keys: Collection[bytes]) -> list[bytes]:
    return [record for _, record in content[b"keys"] if name_of(record) in keys]


# If there are no events, a key whose changes in an epoch cancel each other may be reported by either way, or by none.
@settings(deadline=None, max_examples=examples(20))
@given(
    st.lists(st.tuples(epochs, st.sampled_from(((), (), (), ("one",)))), min_size=1, max_size=4),
    st.sampled_from((3, 40, 1000)),
    st.sampled_from((50, 300, 100_000)),
    st.booleans(),
    st.booleans(),
    st.sampled_from((ALL, SlotSet(((0, 8_000),)))),
)
def test_store_of_packed_values_is_one_that_general_path_makes(
    given_epochs: Sequence[tuple[list[list[Change]], tuple[str, ...]]],
    run_rows: int,
    rows_max: int,
    has_events: bool,
    are_colliding: bool,
    slots: SlotSet,
) -> None:
    canceled: dict[bytes, set[bytes]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for module in ("bulk_writer", "value_writer"):
            stack.enter_context(patch(f"state_backend.lmdb.{module}.PIECE_BYTES", 700))
        stack.enter_context(patch("state_backend.lmdb.transaction.ROWS_MAX", rows_max))
        stack.enter_context(patch("state_backend.lmdb.bulk_writer.ROWS_MAX", 100))
        stack.enter_context(patch("state_backend.codec.packed_map.FIELDS_MAX", 3))
        stack.enter_context(patch("state_backend.codec.packed_map.BYTES_MAX", 900))
        stack.enter_context(patch("state_backend.model.records.RUN_ROWS_MAX", run_rows))
        if are_colliding:
            stack.enter_context(patch("state_backend.model.slots.crc32", lambda text: sum(text) % 5))
        compiled, general = (LmdbStore(folder / name, "g") for name in ("compiled", "general"))
        stack.callback(compiled.close)
        stack.callback(general.close)
        assert compiled._pages is not None and compiled._pages.is_readable
        general._pages = None
        for store in (compiled, general):
            store.records_events = has_events
            store.own(slots)
        for number, (parts, replaces) in enumerate(given_epochs):
            runs = [run for part in parts for run in runs_of(part, NAMES if number % 2 else NAMES[::-1])]
            if slots != ALL:
                runs = [run.filter(pa.array([p >> 32 <= 8_000 for p in positions_in(run).tolist()])) for run in runs]
            before = content_of(general)
            found: list[object] = []
            for store in (compiled, general):
                try:
                    found.append(store.apply(EpochChanges(number, 1, 10 * number, runs, frozenset(replaces)), STATES))
                except SparkisError as error:
                    found.append((type(error), str(error)))
            # Changes that another one of the same key follows are counted by the general path alone.
            assert found[0] == found[1] or all(isinstance(each, int) for each in found)
            mine, theirs = content_of(compiled), content_of(general)
            if not has_events:
                times = Counter(change.key for part in parts for change in part)
                name = changed_name(number)
                canceled[name] = keys_in(theirs, name) ^ keys_in(mine, name)
                assert all(times[key] > 1 for key in canceled[name])
                assert records_of(before, canceled[name]) == records_of(theirs, canceled[name])
            for name, keys in canceled.items():
                theirs[name] = sorted(keys_in(theirs, name) - keys)
                mine[name] = sorted(keys_in(mine, name) - keys)
            assert mine == theirs


def packing_of(
    runs: list[pa.RecordBatch], positions: npt.NDArray[np.uint64], *, form: int = VALUE, takes_whole_keys: bool = False
) -> Packing:
    """Pack rows of a state with the number 3, where nothing stands."""
    tags = [np.array([3 | form << 16], np.int32) for _ in runs]
    order = positions.argsort(kind="stable")
    return native.packing_of(runs, order, tags, None, lambda name: None, 1 << 16, 100, 2, takes_whole_keys)


@given(
    st.lists(st.tuples(st.binary(max_size=40), st.binary(max_size=90)), max_size=200),
    st.integers(1, 70),
    st.integers(0, 9),
)
def test_packing_takes_plain_rows_in_order(rows: list[tuple[bytes, bytes]], rows_max: int, keys_max: int) -> None:
    wanted = dict(rows)
    changes = [Change("one", Op.PUT, key, None, value) for key, value in wanted.items()]
    # Of a slice, whose columns do not begin where their buffers do.
    runs = [run.slice(1) for run in runs_of([Change("one", Op.PUT, b""), *changes], ["one"]) if run.num_rows > 1]
    sliced = [
        (k, v) for run in runs for k, v in zip(*(run.column(c).to_pylist() for c in ("key", "value")), strict=True)
    ]
    positions = np.concatenate([np.empty(0, np.uint64), *map(positions_in, runs)])
    made = packing_of(runs, positions)
    items: list[tuple[bytes, bytes]] = []
    while made.begin(rows_max, keys_max):
        # Each pair is the same two buffers.
        some = [(bytes(name), bytes(record)) for name, record in made]
        assert made.changed == len(some)
        assert made.keys == [record[15:-4][: len(key)] for key, (_, record) in zip(made.keys, some, strict=False)]
        assert len(made.keys) == len(made.are_new) == min(len(some), keys_max) and all(made.are_new)
        assert made.new == Counter((int.from_bytes(name[:2], "big"), 3) for name, _ in some)
        items += some
    assert [name for name, _ in items] == sorted({int(p).to_bytes(POSITION_BYTES, "big") for p in positions})
    assert sum(map(sum, made.skipped)) == len(sliced) - len(items)
    assert {record[15:-4] for _, record in items} <= {key + value for key, value in sliced}


@pytest.mark.parametrize(
    ("parts", "takes_whole_keys", "taken", "skipped"),
    [
        (((b"1", b"2"), (b"3",)), False, b"3", [0, 0, 0]),
        (((b"1", b"2"), (b"3",)), True, None, [0, 1, 1]),
        (((b"1", b"2"),), True, b"2", [0, 0]),
        (((b"1", b"2", None),), False, b"2", [0, 0, 1]),
        (((b"1", b"2", None),), True, None, [0, 1, 1]),
    ],
)
def test_last_plain_row_of_key_is_packed(
    parts: Sequence[Sequence[bytes | None]], takes_whole_keys: bool, taken: bytes | None, skipped: list[int]
) -> None:
    runs = [
        run
        for part in parts
        for run in runs_of([Change("one", Op.PUT if v else Op.DELETE, b"k", None, v) for v in part], ["one"])
    ]
    positions = np.concatenate([positions_in(run) for run in runs])
    made = packing_of(runs, positions, takes_whole_keys=takes_whole_keys)
    items = [(bytes(name), bytes(record)) for name, record in made] if made.begin(10, 10) else []
    assert [checked(record)[-1:] for _, record in items] == ([taken] if taken else [])
    assert not made.begin(10, 10)
    assert [row for rows in made.skipped for row in rows] == skipped


SMALL = packed_map.pack([(b"f", b"1"), (b"g", b"2")])


@pytest.mark.parametrize(
    ("field", "value", "expire_at_ms", "is_taken"),
    [
        (None, SMALL, None, True),
        (None, SMALL, 5, False),
        (b"f", SMALL, None, False),
        (None, packed_map.EMPTY, None, False),
        (None, b"", None, False),
        (None, packed_map.pack([(b"f", b""), (b"g", b""), (b"h", b"")]), None, False),
        (None, packed_map.pack([(b"f", b"v" * 100)]), None, False),
    ],
    ids=["small", "expiring", "field", "empty", "nothing", "many fields", "long"],
)
def test_maps_are_packed_whole_if_they_are_small(
    field: bytes | None, value: bytes, expire_at_ms: int | None, is_taken: bool
) -> None:
    (run,) = runs_of([Change("map", Op.PUT, b"k", field, value, expire_at_ms)], ["map"])
    made = packing_of([run], positions_in(run), form=SMALL_MAP)
    records = [bytes(record) for _, record in made] if made.begin(10, 0) else []
    assert records == ([make_record(b"k", value, None, 3, SMALL_MAP)] if is_taken else [])
    assert list(made.skipped[0]) == [not is_taken]
