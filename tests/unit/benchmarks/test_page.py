"""docs/performance.md and its plots say what benchmarks/results.json says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

from benchmarks import page
from benchmarks.__main__ import PARTS
from benchmarks.results import Row, load, merge

FAST = Row(
    name="a",
    part="reads",
    ours=200.0,
    unit="requests/s",
    better="more",
    peer=100.0,
    ratio=2.0,
    low=1.5,
    high=2.5,
    budget=1.0,
    peer_name="redis-server",
)
SLOW = replace(FAST, name="b", ratio=0.5, low=0.4, high=0.6)
ALONE = Row("c", "delay", 12.5, "ms", "less", low=11.0, high=14.0, budget=50.0)
CURVE = [replace(FAST, name=f"{x}", part="scaling", series="scaling-rate", x=x) for x in (1e5, 1e6)]


def test_page_has_current_results() -> None:
    written = page.PAGE.read_text()
    assert page.text_of(written, load()) == written, "run: python -m benchmarks page"


def test_plots_show_results_as_they_are() -> None:
    found = {path.stem: path.read_text() for path in page.PLOTS.glob("*.svg")}
    assert found == page.drawings(load()), "run: python -m benchmarks page"


def test_page_has_place_for_every_part() -> None:
    places = {found[1] for found in page.PART.findall(page.PAGE.read_text())}
    assert places == set(PARTS) - {
        "many",
        "commands",
        "clients",
    }  # rows beside those of fewer keys, and pages of their own


def test_row_within_its_budget_is_distinguished_from_one_beyond_it() -> None:
    assert FAST.is_within_budget
    assert not SLOW.is_within_budget
    assert ALONE.is_within_budget
    assert not replace(ALONE, ours=51.0).is_within_budget
    assert replace(FAST, budget=None).is_within_budget is None
    shown = page.table([FAST, SLOW])
    assert "| a | 200 requests/s | 100 | 2.00 | 1.50-2.50 | ≥ 1 ✓ |" in shown
    assert "| b | 200 requests/s | 100 | 0.50 | 0.40-0.60 | ≥ 1 ✗ |" in shown


def test_only_text_between_marks_is_rewritten() -> None:
    before = "above\n<!-- results of delay -->\nold\n<!-- end of delay -->\nbelow\n"
    after = page.text_of(before, [ALONE])
    assert after.startswith("above\n") and after.endswith("below\n")
    assert "old" not in after
    assert "| c | 12.5 ms | 11-14 | ≤ 50 ✓ |" in after
    assert page.text_of(after, [ALONE]) == after


def test_row_takes_place_of_one_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    merge([FAST, ALONE], path)
    merge([SLOW, replace(FAST, ours=300.0)], path)
    assert load(path) == [replace(FAST, ours=300.0), SLOW, ALONE]


def test_plots_are_complete_and_have_descriptions() -> None:
    drawn = page.drawings([FAST, SLOW, ALONE, *CURVE])
    assert set(drawn) == {"reads", "delay", "scaling-rate"}
    for svg in drawn.values():
        root = ElementTree.fromstring(svg)
        title = root.find("{http://www.w3.org/2000/svg}title")
        assert title is not None and title.text
        assert "prefers-color-scheme: dark" in svg
    assert len(re.findall("<circle", drawn["reads"])) == 2
    assert "redis-server" in drawn["scaling-rate"]
