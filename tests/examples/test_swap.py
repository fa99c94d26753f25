"""The whole story of a swap: the app reads nothing wrong, misses nothing, and writes each event once."""

from __future__ import annotations

import re

import pytest

from tests.examples.example import run

pytestmark = pytest.mark.spark


def check_story(lines: list[str]) -> None:
    text = "\n".join(lines)
    steps = ["before: ", "1. sparkis swap-check:", "2. ", "3. ", "4. ", "Redis was killed: "]
    found = [next(at for at, line in enumerate(lines) if line.startswith(step)) for step in steps]
    assert found == sorted(found)
    assert re.search(r"^dash/<account>/requests +dash:requests \(string\) +5 ", text, re.MULTILINE)
    assert re.fullmatch(r"\d+ reads, none of the state failed, none wrong; \d+ events, each once", lines[-1])


@pytest.mark.slow
def test_example_shows_swap_to_its_end_and_deletes_old_copies() -> None:
    lines = run("swap")
    check_story(lines)
    assert "5 copies deleted." in lines


@pytest.mark.slow
def test_way_back_leads_to_copies_again() -> None:
    lines = run("swap", "--back")
    check_story(lines)
    assert "the way back: the copy has caught up, and the app has its old address" in lines


def test_help_of_swap_needs_no_spark() -> None:
    assert "redis" in " ".join(run("swap", "--help", JAVA_HOME="/nowhere")).lower()
