"""The tables of docs/metrics.md are those of the declarations."""

from __future__ import annotations

from scripts import metrics_page


def test_tables_are_those_of_declarations() -> None:
    text = metrics_page.PAGE.read_text()
    assert metrics_page.page(text) == text, "run `make metrics`"
