"""The pattern of a job's keys, or of a state's."""

from __future__ import annotations

import pytest

from sparkis_ui.facts import Job, jobs_of
from sparkis_ui.pages.browse import pattern_of

JOBS: list[Job] = jobs_of(
    [
        {
            b"name": b"flights",
            b"state_names": [b"last", b"golden"],
            b"key_formats": [b"plane/<tailnum>", b"flights:golden:<c>"],
        },
        {b"name": b"one", b"state_names": [b"s"], b"key_formats": [b"x/<a>-<b>/[y]"]},
        {b"name": b"o*d", b"state_names": [b"a", b"b"], b"key_formats": [b"o*d:a:<k>", b"o*d:b:<k>"]},
    ]
)


@pytest.mark.parametrize(
    ("job", "state", "pattern"),
    [
        ("", "", "*"),
        ("flights", "last", "plane/*"),
        ("flights", "golden", "flights:golden:*"),
        ("flights", "", "flights:*"),
        ("one", "", r"x/*-*/\[y\]"),
        ("o*d", "", r"o\*d:*"),
        ("unknown", "", "*"),
    ],
)
def test_pattern_is_made_of_key_formats(job: str, state: str, pattern: str) -> None:
    assert pattern_of(JOBS, job, state) == pattern
