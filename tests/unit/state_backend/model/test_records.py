"""Changes travel as sorted runs of bounded size and come back as they were."""

from __future__ import annotations

import pytest

from state_backend.model import records
from state_backend.model.errors import ChangeError
from state_backend.model.records import Change, Op, changes_in, runs_of, schema
from state_backend.model.slots import hash_position


def test_changes_round_trip() -> None:
    given = [
        Change("temp", Op.PUT, b"", None, b"", 1),
        Change("city", Op.PUT, b"\xff\x00", b"", b"\xfe"),
        Change("city", Op.DELETE, b"k", b"f"),
        Change("temp", Op.CLEAR, b"k2"),
    ]
    (run,) = runs_of(given, ["city", "temp"])
    assert run.schema == schema()
    assert sorted(changes_in(run)) == sorted(given)
    assert all(isinstance(change, Change) for change in changes_in(run))


def test_no_change_makes_no_run() -> None:
    assert list(runs_of([], ["temp"])) == []


def test_run_ends_at_its_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RUN_ROWS_MAX", 3)
    runs = list(runs_of([Change("temp", Op.PUT, b"%d" % number, None, b"") for number in range(7)], ["temp"]))
    assert [run.num_rows for run in runs] == [3, 3, 1]


def test_run_ends_at_its_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RUN_BYTES_MAX", 100)
    runs = list(runs_of([Change("temp", Op.PUT, b"k", None, b"x" * 60) for _ in range(5)], ["temp"]))
    assert [run.num_rows for run in runs] == [2, 2, 1]


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("key", Change("temp", Op.PUT, b"k" * 65_537, None, b"")),
        ("field", Change("city", Op.DELETE, b"k", b"f" * 65_537)),
        ("value", Change("temp", Op.PUT, b"k", None, bytes((64 << 20) + 1))),
    ],
)
def test_too_long_text_is_refused_by_name(what: str, change: Change) -> None:
    with pytest.raises(ChangeError, match=f"state '{change.state}': a {what} of the key b'k.* bytes; the limit is"):
        list(runs_of([change], ["city", "temp"]))


def test_longest_allowed_texts_are_readable() -> None:
    given = [
        Change("city", Op.PUT, b"k" * 65_536, b"f" * 65_536, b""),
        Change("temp", Op.PUT, b"k", None, bytes(64 << 20)),
    ]
    assert sorted(each for run in runs_of(given, ["city", "temp"]) for each in changes_in(run)) == sorted(given)


def test_run_is_sorted_by_position() -> None:
    (run,) = runs_of([Change("temp", Op.PUT, b"%d" % number, None, b"") for number in range(100)], ["temp"])
    positions = run.column("position").to_pylist()
    assert positions == sorted(positions) == [hash_position(change.key) for change in changes_in(run)]
