"""`make fuzz-paths`: it sends every command, finds a difference of the two paths, and shows the shortest case."""

from __future__ import annotations

from typing import Any

import pytest

from compat.fuzz import paths
from compat.fuzz.path_requests import LEFT_OUT, names
from compat.fuzz.seeds import names as names_of_commands
from resp_server.commands import command_table
from state_backend.lmdb.store import LmdbStore

pytestmark = pytest.mark.compiled


def test_every_served_command_is_sent_or_left_out_for_reason() -> None:
    table = command_table()
    served = {name for name in names_of_commands() if (found := table.get(name.encode())) and found.handler is not None}
    assert served - names() == LEFT_OUT.keys()
    assert not names() & LEFT_OUT.keys()


def test_seed_makes_same_case_again() -> None:
    assert paths.case_of(7) == paths.case_of(7)
    assert paths.case_of(7) != paths.case_of(8)


def test_equal_paths_have_no_difference(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(paths, "PIPELINES_PER_CASE", 30)
    assert paths.main(["--requests", "100", "--seed", "3"]) == 0
    assert "without a difference" in capsys.readouterr().out


class WithoutGet(paths.Twin):
    """A server whose general path lets nobody send GET."""

    def __init__(self, store: LmdbStore, case: paths.Case, *, is_compiled: bool) -> None:
        super().__init__(store, case, is_compiled=is_compiled)
        if not is_compiled:
            self.server.users.set(b"default", [*case.rules, b"-get"])


def test_difference_is_shown_shortest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(paths, "Twin", WithoutGet)
    monkeypatch.setattr(paths, "PIPELINES_PER_CASE", 30)
    assert paths.main(["--requests", "1000", "--seed", "3"]) == 1
    lines = capsys.readouterr().out.splitlines()
    steps = [line for line in lines if line.startswith("  [b")]
    assert lines[0] == "seed 3"
    assert steps[:-1] in ([], ["  [b'MULTI']"])
    assert "b'get'" in steps[-1].lower()
    assert "NOPERM" in lines[-1]


@pytest.mark.parametrize("needed", [{3}, {0, 19}, {7, 8, 13}])
def test_shortest_case_has_only_steps_that_differ(needed: set[int]) -> None:
    steps: list[Any] = [[b"%d" % number] for number in range(20)]
    case = paths.Case(None, [], None, paths.Epoch(1), steps)
    found = paths.shortest(case, lambda each: needed <= {int(words[0]) for words in each.steps if words})  # type: ignore[arg-type]
    assert [int(words[0]) for words in found.steps] == sorted(needed)  # type: ignore[arg-type]
