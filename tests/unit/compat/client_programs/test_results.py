"""A client's results at one place: a program that fails at the real server proves nothing about sparkis."""

from __future__ import annotations

import pytest

from compat.client_programs.results import At
from compat.client_programs.runs import END

STEPS = {"GET": "'7'", "HGETALL": "{'a': '1'}", "a refused write": "READONLY You can't write"}
REFUSED = dict.fromkeys(STEPS, "Connection refused")


def at(expected: dict[str, str]) -> At:
    return At("server", "server", expected, expected)


def test_different_results_prove_difference() -> None:
    assert not at(STEPS).proves_nothing


@pytest.mark.parametrize("expected", [{}, STEPS | {END: "exit code 1"}, REFUSED, REFUSED | {"the start": "ready"}])
def test_program_failing_at_redis_proves_nothing(
    expected: dict[str, str],
) -> None:
    assert not at(expected).different
    assert at(expected).proves_nothing
