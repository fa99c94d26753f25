"""What is made of what clients saw: where two outcomes differ, and the tables of the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from compat.conformance.dataset import standard
from compat.conformance.matrix import Cell, difference, is_unsupported
from compat.conformance.page import BEGIN, END, put_into, tables
from compat.conformance.transcripts import Replay

PAGE = Path(__file__).parents[4] / "docs" / "clients.md"


def test_first_difference_is_shown_with_its_place() -> None:
    problem = difference({"a": [1, 2], "b": 1}, {"a": [1, 3], "b": 2})
    assert problem.splitlines() == ["at /a/1", "    the real server: 2", "    ours:            3"]
    assert difference([1], [1, 2]).startswith("at /\n")


def test_feature_is_missing_only_if_no_variant_of_client_has_it() -> None:
    assert is_unsupported("not supported")
    assert is_unsupported([["RESP2", "not supported"], ["RESP3", "not supported"]])
    assert not is_unsupported([["RESP2", "not supported"], ["RESP3", 1]])
    assert not is_unsupported([])
    assert not is_unsupported(None)


def test_cells_stand_in_rows_of_features_and_columns_of_clients() -> None:
    cells = [
        Cell("ioredis 6", "scan", "server", True),
        Cell("ioredis 6", "scan", "cluster node", False, "why"),
        Cell("ioredis 6", "scan", "proxy", None),
        Cell("redis-cli", "--pipe", "server", True),
    ]
    replayed = [
        Replay("Jedis 8", "a look-up", "server", True, ""),
        Replay("Jedis 8", "a look-up", "proxy", False, "why"),
    ]
    versions = {"redis-py 8": "8.1.0", "ioredis 6": "6.0.0", "redis-cli": "7.0.15"}
    text = tables(cells, versions, replayed)
    assert "| feature | redis-py 8.1.0 | ioredis 6.0.0 |" in text
    assert "| scan | · · · | ✓ ✗ · |" in text
    assert "| redis-cli 7.0.15 | tested |" in text
    assert "| --pipe | ✓ |" in text
    assert "| Jedis 8 | a look-up | server ✓, proxy ✗ |" in text


def test_tables_are_put_between_marks_of_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    put_into(page, "new\n")
    assert page.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="lacks the marks"):
        put_into(page, "new\n")


def test_page_has_tables_and_no_failed_cell() -> None:
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    shown, end, _ = rest.partition(END)
    assert end
    assert "| feature |" in shown
    assert "✗" not in shown


def test_one_key_of_each_kind_is_largest() -> None:
    data = standard()
    for kind in (data.strings, data.hashes, data.lists, data.sets, data.sorted_sets):
        second, first = sorted(map(len, kind.values()))[-2:]
        assert second < first
