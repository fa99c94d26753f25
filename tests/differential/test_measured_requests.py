"""The requests of the benchmark of all commands are valid at a real server, and have the same replies at ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.commands.data import SIZE, STATES, dataset
from benchmarks.commands.measure import COMPARED, is_same
from benchmarks.commands.requests import Exchange, exchanges, shapes
from compat.conformance.dataset_log import dataset_writer, publish
from compat.conformance.differential import Address, judge_of
from compat.conformance.pair import Pair
from compat.conformance.servers import fill, redis_server, sparkis_server, wait_for_keys
from compat.conformance.wire import Reply

# The sizes of the data: without the largest, which takes seconds to load.
SIZES = (1, SIZE)
# Only a cluster's node, or a server with a file or other settings, replies to these with anything but an error.
ERRORS = ("ACL LOAD", "ACL SAVE", "ASKING", "CLUSTER ", "CONFIG REWRITE", "LATENCY GRAPH", "OBJECT FREQ", "READ")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    keys, log = dataset(STATES, SIZES), tmp_path_factory.mktemp("log")
    with dataset_writer(log) as writer:
        publish(keys, writer)
    with redis_server(tmp_path_factory.mktemp("redis")) as real, sparkis_server(Path(log, "store"), log) as ours:
        fill(real, keys)
        wait_for_keys(ours, len(keys.keys))
        judge = judge_of(Address("127.0.0.1", real.port), Address("127.0.0.1", ours.port), keys)
        yield Pair(real, ours, judge)


def replies(pair: Pair, exchange: Exchange) -> list[list[Reply]]:
    """Return the real server's replies to an exchange, and ours."""
    found = []
    for server in (pair.redis, pair.sparkis):
        with server.connect() as connection:
            for words in exchange.before:
                assert not connection.call(*words).is_error
            found.append([connection.call(*words) for words in exchange.numbered(COMPARED)])
    return found


@pytest.mark.parametrize("exchange", list(exchanges(STATES)), ids=lambda exchange: exchange.name)
def test_each_command_equals_redis(measured: Pair, exchange: Exchange) -> None:
    theirs, ours = replies(measured, exchange)
    if exchange.stand_in and theirs[0].is_error:
        with measured.redis.connect() as connection:
            assert not connection.call(*exchange.stand_in).is_error or exchange.name.startswith(ERRORS)
    else:
        requests = exchange.numbered(COMPARED)
        different = [
            (words, their.raw, our.raw)
            for words, their, our in zip(requests, theirs, ours, strict=True)
            if not is_same(measured.judge, words, their, our)
        ]
        assert different == []
    if not exchange.name.startswith(ERRORS):
        assert not any(reply.is_error for reply in ours)


def test_each_shape_equals_redis(measured: Pair) -> None:
    for exchange in shapes(STATES):
        if exchange.size in SIZES:
            theirs, ours = replies(measured, exchange)
            for words, their, our in zip(exchange.numbered(COMPARED), theirs, ours, strict=True):
                assert not our.is_error
                assert is_same(measured.judge, words, their, our), words
