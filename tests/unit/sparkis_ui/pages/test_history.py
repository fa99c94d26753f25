"""The moments of a key's history."""

from __future__ import annotations

from typing import Any

import pytest

from sparkis_ui.pages.history import moments_of


def row(epoch: int, value: Any, kind: str = "value", **more: Any) -> dict[str, Any]:
    return {"epoch": epoch, "committed_at": b"2026-01-01T00:00:00Z", "kind": kind.encode(), "value": value} | more


def test_moment_shows_fields_that_changed() -> None:
    rows = [
        row(3, {b"a": b"2", b"b": b"9"}, "map"),
        row(2, {b"a": b"1", b"b": b"9"}, "map"),
        row(1, {b"b": b"9"}, "map"),
    ]
    assert [each.differs for each in moments_of(rows)] == [{"a"}, {"a"}, set()]


def test_deleted_key_is_gone() -> None:
    now, before = moments_of([row(2, None), row(1, b"x", is_oldest=1)])
    assert (now.is_gone, now.value) == (True, "")
    assert (before.is_gone, before.value, before.is_oldest) == (False, "x", True)


@pytest.mark.parametrize(
    ("value", "kind", "pairs"),
    [
        ([b"m", b"1.5"], "sorted-set", [("m", "1.5")]),
        ([[b"m", 1.5]], "sorted-set", [("m", "1.5")]),
        ([b"x", b"y"], "list", [("0", "x"), ("1", "y")]),
        ({b"f\x00": b"\xff"}, "map", [(r"f\x00", r"\xff")]),
        (b"text", "value", []),
    ],
)
def test_values_of_every_kind_are_pairs_of_texts(value: Any, kind: str, pairs: list[tuple[str, str]]) -> None:
    (moment,) = moments_of([row(1, value, kind)])
    assert list(moment.pairs) == pairs
