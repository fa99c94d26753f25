"""A run of a program that asks for something, and of one that ends before it is answered."""

from __future__ import annotations

import sys
from pathlib import Path

from compat.client_programs.runs import END, run
from compat.waiting import eventually

WAITS = "print('! kill a', flush=True); input(); print('after: it')"
# It cannot be answered any more, says so in a file, and fails.
LEAVES = "import os, sys; print('! kill a', flush=True); os.close(0); open(sys.argv[1], 'w').close(); sys.exit(3)"


class Place:
    """An address that answers once a file is there, if there is one to wait for."""

    name = "a place"

    def __init__(self, awaited: Path | None = None) -> None:
        self._awaited = awaited

    def environment(self) -> dict[str, str]:
        return {}

    def put(self, key: str, value: str) -> None: ...

    def delete(self, key: str) -> None: ...

    def kill(self, key: str) -> None:
        if self._awaited is not None:
            eventually(self._awaited.exists)


def test_answered_program_continues() -> None:
    assert run([sys.executable, "-c", WAITS], Place())["after"] == "it"


def test_program_that_ends_before_its_answer_has_result(tmp_path: Path) -> None:
    left = tmp_path / "left"
    assert run([sys.executable, "-c", LEAVES, str(left)], Place(left))[END] == "exit code 3"
