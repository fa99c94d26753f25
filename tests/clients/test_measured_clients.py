"""The programs of the benchmark of clients: those whose clients the tests install run at a real server, and at ours."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

from benchmarks.clients import rows_of
from benchmarks.clients.places import OF_STATES, OF_UPSTREAM, Place, Scene
from benchmarks.clients.programs import NODE_MODULES, PROGRAMS, READS, WRITES, Program
from benchmarks.commands.data import UPSTREAM
from benchmarks.options import Options
from compat.conformance.wire import Connection

KEYS = 200
# One round, with measurements of milliseconds.
TRIAL = Options(rounds=1, scale=0.02)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[Place]]:
    """One address with an upstream: a place for the keys of states, and one for the upstream's."""
    with ExitStack() as stack:
        scene = Scene(tmp_path_factory.mktemp("clients"), stack, KEYS)
        yield list(scene.upstream(stack))


@pytest.fixture(params=["redis-py", "node-redis"])
def program(request: pytest.FixtureRequest) -> Program:
    if request.param == "node-redis" and (shutil.which("node") is None or not NODE_MODULES.is_dir()):
        pytest.skip("node, or the JavaScript clients, are not installed (npm ci in tests/clients)")
    return next(each for each in PROGRAMS if each.name == request.param)


def test_each_workload_is_measured_at_both_places(program: Program, places: Sequence[Place]) -> None:
    failed: list[str] = []
    rows = [row for each in places for row in rows_of(program, program.installed(), each, TRIAL, failed, KEYS)]
    assert failed == []
    assert [row.name for row in rows] == [
        f"{program.name}, {place}, {workload.title}"
        for place, workloads in ((OF_STATES, READS), (OF_UPSTREAM, (*READS, *WRITES)))
        for workload in workloads
    ]
    assert all(row.ours > 0 and row.ratio and row.note == program.version() for row in rows)


def test_wrong_reply_leaves_row_without_number(program: Program, places: Sequence[Place]) -> None:
    place = places[1]._replace(workloads=READS[:1])
    failed: list[str] = []
    with Connection(place.redis.port) as redis:
        redis.call("SET", f"{UPSTREAM}:text:1", "of another key")
        try:
            assert not list(rows_of(program, program.installed(), place, TRIAL, failed, KEYS))
        finally:
            redis.call("SET", f"{UPSTREAM}:text:1", "value:1")
    (text,) = failed
    assert "had a wrong reply, and 0 failed" in text
