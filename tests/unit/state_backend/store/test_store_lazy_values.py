"""Values of several keys that are read together equal those read one by one, up to the first long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import WrongKindError
from state_backend.model.records import Change, Op
from state_backend.store.memory_store import MemoryStore
from state_backend.store.store import READ_TOGETHER_BYTES_MAX, Snapshot, Store, Value
from tests.builders import apply_epoch

NOW_MS = 1_700_000_000_000
LARGE = bytes(READ_TOGETHER_BYTES_MAX + 1)
STATES = [StateDescriptor("s", key="k", value="v"), StateDescriptor("m", key="k", value=("f", "g"))]
CHANGES = [
    Change("s", Op.PUT, b"j:s:1", value=b"one"),
    Change("s", Op.PUT, b"j:s:{2}", value=b""),
    Change("s", Op.PUT, b"j:s:gone", value=b"x", expire_at_ms=NOW_MS + 1),
    Change("s", Op.PUT, b"j:s:due", value=b"later", expire_at_ms=NOW_MS + 9000),
    Change("s", Op.PUT, b"j:s:large", value=LARGE),
    Change("m", Op.PUT, b"j:m:1", field=b"f", value=b"1"),
]


def snapshot_of(store: Store) -> Snapshot:
    apply_epoch(store, STATES, CHANGES, 0, clock_ms=NOW_MS)
    return store.snapshot(NOW_MS + 10)


@pytest.fixture(params=["lmdb", "memory"])
def snapshot(request: pytest.FixtureRequest, tmp_path: Path) -> Snapshot:
    return snapshot_of(LmdbStore(tmp_path / "store", "g") if request.param == "lmdb" else MemoryStore("g"))


def test_many_lazy_values_equal_those_of_each_key(snapshot: Snapshot) -> None:
    keys = [b"j:s:1", b"j:s:none", b"j:s:{2}", b"j:s:gone", b"j:s:due", b"j:s:large", b"j:s:1"]
    read: list[Value | None] = []
    while len(read) < len(keys):
        some = snapshot.lazy_values(keys[len(read) :])
        assert some
        read += some
    assert read == [snapshot.lazy_value(key) for key in keys]
    assert read[:5] == [b"one", None, b"", None, b"later"]


def test_key_of_another_kind_is_error_by_itself(snapshot: Snapshot) -> None:
    assert snapshot.lazy_values([b"j:s:1", b"j:m:1", b"j:s:1"]) == [b"one"]
    with pytest.raises(WrongKindError, match="j:m:1"):
        snapshot.lazy_values([b"j:m:1", b"j:s:1"])


def test_large_value_ends_batch_of_reads(snapshot: Snapshot) -> None:
    assert snapshot.lazy_values([b"j:s:1", b"j:s:large", b"j:s:1"]) == [b"one"]
    assert snapshot.lazy_values([b"j:s:large", b"j:s:1"]) == [LARGE]
