"""Real Redis servers, and the comparison of replies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from compat.conformance.dataset import Dataset
from compat.conformance.judge import Deviations, Judge
from compat.conformance.pair import Pair
from compat.conformance.servers import Running, fill, free_port, has_redis, redis_server, sparkis_server, wait_for_keys
from compat.reference.capture import ADDITIONS, ROW_FIELDS, Table, capture, load, merge
from tests.server.overlay import Overlay


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a real server there is nothing to compare with."""
    if not has_redis():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="there is no redis-server on the PATH"))


@pytest.fixture(scope="session")
def redis_primary(tmp_path_factory: pytest.TempPathFactory, dataset: Dataset) -> Iterator[Running]:
    """A real server with the data set, for reads."""
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        fill(server, dataset)
        yield server


@pytest.fixture(scope="session")
def redis_replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A real read-only replica without a primary, for refused writes."""
    with redis_server(tmp_path_factory.mktemp("redis"), "--replicaof", f"127.0.0.1 {free_port()}") as server:
        yield server


@pytest.fixture(scope="session")
def live_table(redis_primary: Running) -> Table:
    """The command table of the real server, as its own version has it."""
    return capture("127.0.0.1", redis_primary.port)


@pytest.fixture(scope="session")
def expected_table(live_table: Table) -> Table:
    """The command table of the version that sparkis claims: the real server's and what came after it."""
    return merge(live_table, load(ADDITIONS))


@pytest.fixture(scope="session")
def deviations() -> Deviations:
    """The intended differences."""
    return Deviations.load()


@pytest.fixture(scope="session")
def judge(
    dataset: Dataset, sparkis: Running, live_table: Table, expected_table: Table, deviations: Deviations
) -> Judge:
    """Return the judge, which compares replies."""
    with sparkis.connect() as connection:
        settings = connection.call("CONFIG", "GET", "*").plain[::2]
    alike = [
        name.encode()
        for name, row in live_table.items()
        if all(row.get(field) == expected_table[name].get(field) for field in (*ROW_FIELDS, "subcommands"))
    ]
    return Judge(deviations, frozenset(settings), frozenset(alike), frozenset(dataset.keys), dataset.items)


@pytest.fixture(scope="session")
def pair(redis_primary: Running, sparkis: Running, judge: Judge) -> Pair:
    """A server of each kind, without a password."""
    return Pair(redis_primary, sparkis, judge)


@pytest.fixture(scope="session")
def replica_pair(
    tmp_path_factory: pytest.TempPathFactory, dataset_log: Path, dataset: Dataset, redis_replica: Running, judge: Judge
) -> Iterator[Pair]:
    """A read-only replica of each kind."""
    with sparkis_server(tmp_path_factory.mktemp("store"), dataset_log, "--role", "slave") as server:
        wait_for_keys(server, len(dataset.keys))
        yield Pair(redis_replica, server, judge)


@pytest.fixture(scope="session")
def locked_pair(
    tmp_path_factory: pytest.TempPathFactory, locked_sparkis: Running, dataset: Dataset, judge: Judge
) -> Iterator[Pair]:
    """A server of each kind that asks for the same password."""
    assert locked_sparkis.password is not None
    with redis_server(tmp_path_factory.mktemp("redis"), password=locked_sparkis.password) as server:
        fill(server, dataset)
        yield Pair(server, locked_sparkis, judge)


@pytest.fixture(scope="module")
def overlay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Overlay]:
    """A proxy with an upstream. Two connections to it: what one of them mixes up would show."""
    with ExitStack() as stack:
        yield Overlay(tmp_path_factory.mktemp("overlay"), stack, "--upstream-connections", "2")
