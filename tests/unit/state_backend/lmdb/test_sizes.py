"""The bytes of a key in an LMDB store: exact if all of it is read, estimated if a part is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from state_backend.store.store import Snapshot
from tests.builders import apply_epoch

COUNT = 5000
VALUE = 40
LONG = 300_000
STATES = [
    StateDescriptor("text", value="v", key_format="text:<k>"),
    StateDescriptor("map", value="v", field="f", key_format="map:<k>"),
    StateDescriptor("list", value="v", kind="list", key_format="list:<k>"),
    StateDescriptor("set", member="m", key_format="set:<k>"),
    StateDescriptor("ranks", member="m", score="s", key_format="ranks:<k>"),
]
NAMES = [b"name:%05d" % number for number in range(COUNT)]
CHANGES = [
    Change("text", Op.PUT, b"text:small", value=b"x" * VALUE),
    Change("text", Op.PUT, b"text:long", value=b"x" * LONG),
    *(Change("map", Op.PUT, b"map:large", field=name, value=b"x" * VALUE) for name in NAMES),
    Change("map", Op.PUT, b"map:long", field=b"f", value=b"x" * LONG),
    *(Change("list", Op.APPEND, b"list:long", value=b"x" * VALUE) for _ in NAMES),
    *(Change("set", Op.PUT, b"set:large", field=name, value=b"") for name in NAMES),
    *(Change("ranks", Op.PUT, b"ranks:large", field=name, value=b"%d" % at) for at, name in enumerate(NAMES)),
]
LEAST = {
    b"text:small": 10 + VALUE,
    b"text:long": LONG,
    b"map:large": COUNT * (10 + VALUE),
    b"map:long": LONG,
    b"list:long": COUNT * VALUE,
    b"set:large": COUNT * 10,
    b"ranks:large": COUNT * (10 + 8) * 2,  # by name and by rank
}


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Snapshot]:
    path: Path = tmp_path_factory.mktemp("store")
    store = LmdbStore(path, "g1")
    apply_epoch(store, STATES, CHANGES, 0, clock_ms=1000)
    with store.snapshot(2000) as found:
        yield found
    store.close()


@pytest.mark.parametrize("key", LEAST)
def test_size_of_key_is_its_bytes_and_overhead_per_row(snapshot: Snapshot, key: bytes) -> None:
    numbers = list(snapshot.stored_sizes(key, 10 * COUNT))
    rows = COUNT if LEAST[key] >= COUNT * 10 and b"long" not in key else 10
    assert LEAST[key] < sum(numbers) < 2 * LEAST[key] + 50 * rows
    assert max(numbers) < 2 << 20


@pytest.mark.parametrize("key", LEAST)
def test_sample_of_items_estimates_their_size(snapshot: Snapshot, key: bytes) -> None:
    whole, by_part = (sum(snapshot.stored_sizes(key, items)) for items in (10 * COUNT, 256))
    assert abs(by_part - whole) < whole / 10


def test_missing_key_takes_nothing(snapshot: Snapshot) -> None:
    assert list(snapshot.stored_sizes(b"missing", 10)) == []
