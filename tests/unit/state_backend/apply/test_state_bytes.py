"""The bytes of each state: every key once, every field and value."""

from __future__ import annotations

from pathlib import Path

import pytest

from state_backend.apply.state_bytes import StateBytes
from state_backend.codec import packed_map
from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op, runs_of
from tests.builders import apply_epoch

MAP = packed_map.pack([(b"f", b"12")])
CHANGES = [
    Change("v", Op.PUT, b"job:v:1", None, b"123"),
    Change("v", Op.PUT, b"job:v:two", None, b""),
    Change("m", Op.PUT, b"job:m:small", None, MAP),
    *(Change("m", Op.PUT, b"job:m:large", b"f%d" % number, b"12345") for number in range(10)),
    *(Change("l", Op.APPEND, b"job:l:1", None, b"12") for _ in range(10)),
]
BYTES = {"v": 7 + 3 + 9, "m": 11 + len(MAP) + 11 + 10 * 7, "l": 7 + 20}


@pytest.mark.parametrize("run_rows", [1, 3, 1000])
def test_key_counts_once_and_each_of_its_fields_and_elements(run_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("state_backend.model.records.RUN_ROWS_MAX", run_rows)
    # In the order of a store: rows of one key are contiguous.
    runs = [run for each in _by_position() for run in runs_of(each, ["v", "none", "m", "l"])]
    counted = StateBytes()
    assert list(counted.counted(runs)) == runs
    assert counted.counts == BYTES


def _by_position() -> list[list[Change]]:
    return [[each for each in CHANGES if each.key == key] for key in dict.fromkeys(each.key for each in CHANGES)]


def test_store_of_keys_of_every_size_is_counted(tmp_path: Path) -> None:
    states = [
        StateDescriptor("v", key="k", value="v"),
        StateDescriptor("m", key="k", field="f", value="v"),
        StateDescriptor("l", key="k", value="v", kind="list", duplicates="any"),
    ]
    many = 3000
    changes = [
        Change("v", Op.PUT, b"job:v:1", None, b"x" * 300_000),
        *(Change("m", Op.PUT, b"job:m:1", b"%04d" % number, b"12345") for number in range(many)),
        *(Change("l", Op.APPEND, b"job:l:1", None, b"12") for _ in range(many)),
    ]
    store, counted = LmdbStore(tmp_path / "store", "g1"), StateBytes()
    apply_epoch(store, states, changes, 0)
    with store.snapshot(1) as snapshot:
        for _ in counted.counted(snapshot.runs(["v", "m", "l"])):
            pass
    assert counted.counts == {"v": 7 + 300_000, "m": 7 + many * 9, "l": 7 + many * 2}
    store.close()


def test_counts_are_unknown_if_some_of_them_are() -> None:
    counted = StateBytes()
    counted.add({"v": 3, "m": 1})
    counted.add({"v": 4})
    assert counted.counts == {"v": 7, "m": 1}
    counted.add(None)
    assert list(counted.counted(runs_of(CHANGES, ["v", "m", "l"]))) and counted.counts is None
