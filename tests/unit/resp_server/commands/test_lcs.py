"""LCS equals the algorithm with the whole table, at once and in steps."""

from __future__ import annotations

from itertools import product
from random import Random
from typing import Any

import pytest

from resp_server.commands import lcs
from resp_server.commands.lcs import LcsOptions
from resp_server.protocol.replies import Sliced
from tests.unit.resp_server.conftest import Client


def by_table(a: bytes, b: bytes, length_min: int) -> tuple[bytes, list[Any]]:
    """Return a longest common subsequence, and its runs, by Redis' own table and way back."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, j in product(range(1, len(a) + 1), range(1, len(b) + 1)):
        same = a[i - 1] == b[j - 1]
        table[i][j] = table[i - 1][j - 1] + 1 if same else max(table[i - 1][j], table[i][j - 1])
    i, j, common, runs = len(a), len(b), b"", []
    run = 0
    while i and j:
        if a[i - 1] == b[j - 1]:
            common, run, i, j = a[i - 1 : i] + common, run + 1, i - 1, j - 1
            continue
        if run:
            runs.append([[i, i + run - 1], [j, j + run - 1], run])
        run = 0
        if table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    if run:
        runs.append([[i, i + run - 1], [j, j + run - 1], run])
    return common, [each for each in runs if each[2] >= length_min]


def lcs_reply(a: bytes, b: bytes, options: LcsOptions) -> Any:
    return next(reply for reply in lcs._reply_after_steps(a, b, options) if reply is not None)


def test_texts_matches_and_lengths_are_those_of_table() -> None:
    random = Random(1)
    for _ in range(300):
        a, b = (bytes(random.choices(b"abc", k=random.randrange(14))) for _ in range(2))
        length_min = random.randrange(3)
        common, runs = by_table(a, b, length_min)
        assert lcs_reply(a, b, LcsOptions()) == common
        assert lcs_reply(a, b, LcsOptions(has_length=True)) == len(common)
        found = lcs_reply(a, b, LcsOptions(has_matches=True, has_match_lengths=True, length_min=length_min))
        assert found == {b"matches": runs, b"len": len(common)}


@pytest.mark.parametrize("options", ["", "LEN", "IDX", "IDX WITHMATCHLEN MINMATCHLEN 2"])
def test_reply_in_steps_equals_reply_at_once(client: Client, monkeypatch: pytest.MonkeyPatch, options: str) -> None:
    line = f"LCS job:temp:soon job:temp:soon {options}"
    at_once = client.ask(line)
    monkeypatch.setattr(lcs, "STEP_ROWS", 2)
    assert isinstance(lcs.lcs(client.call, *map(str.encode, line.split()[1:])), Sliced)
    assert client.ask(line) == at_once
