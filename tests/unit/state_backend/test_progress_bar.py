"""The progress bar of a command: on a terminal alone, and removed at the end."""

from __future__ import annotations

import io

import pytest

from state_backend.progress_bar import WIDTH, ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_shows_bar_and_its_line_is_empty_at_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with ProgressBar("partitions") as progress:
        progress.show(1, 4)
        progress.show(1, 4)
        progress.show(4, 4)
    quarter = f"[{'#' * (WIDTH // 4)}{'-' * (WIDTH - WIDTH // 4)}] 1 of 4 partitions"
    assert terminal.getvalue() == f"\r{quarter} \r[{'#' * WIDTH}] 4 of 4 partitions \r\033[K"


def test_nothing_but_terminal_shows_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr("sys.stderr", file)
    with ProgressBar("partitions") as progress:
        progress.show(1, 4)
    assert file.getvalue() == ""
