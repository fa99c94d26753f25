"""A request for keys of a job that is being opened waits a moment, instead of getting LOADING at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from state_backend.store.keyspace import Job
from state_backend.store.memory_store import MemoryStore
from tests.builders import apply_epoch

pytestmark = pytest.mark.pure

STATE = StateDescriptor("s", key="k", value="v")
OPENING = b"-LOADING job 'new' is being opened, retry in a moment\r\n"
NEW, OLD = b"GET new:s:a\r\n", b"GET job:temp:7\r\n"
LONG_S = 600.0


@pytest.fixture
def served(serve: Callable[..., Any]) -> Any:
    """A server of one open job, and of one that its appliers have just found."""
    server = serve()
    server.call(lambda: server.server.context.keyspace.refuse("new", None))
    return server


def open_job(server: Any) -> None:
    store = MemoryStore("g")
    apply_epoch(store, [STATE], [Change("s", Op.PUT, b"new:s:a", value=b"v")], 0, clock_ms=0)
    server.call(lambda: server.server.context.keyspace.put(Job("new", "g", [STATE], store)))


def wait_until_waiting(server: Any, count: int) -> None:
    while (
        len(server.call(lambda: [each for each in server.server.context.loading_waits._waiting if each.is_awaited]))
        < count
    ):
        pass


def test_pipeline_waits_in_order_and_other_clients_do_not(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resp_server.pipeline.loading_waits.LOADING_WAIT_S", LONG_S)
    peer, other = served.connect(), served.connect()
    peer.expect_reply(OLD + NEW + OLD + b"MGET new:s:a new:s:b\r\nPING\r\n", b"$1\r\n7\r\n")
    wait_until_waiting(served, 1)
    other.expect_reply(OLD, b"$1\r\n7\r\n")
    open_job(served)
    expected = b"$1\r\nv\r\n$1\r\n7\r\n*2\r\n$1\r\nv\r\n$-1\r\n+PONG\r\n"
    assert peer.read(len(expected)) == expected


def test_slow_job_is_error_and_next_request_does_not_wait(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resp_server.pipeline.loading_waits.LOADING_WAIT_S", 0.05)
    peer = served.connect()
    peer.expect_reply(NEW, OPENING)
    monkeypatch.setattr("resp_server.pipeline.loading_waits.LOADING_WAIT_S", LONG_S)
    peer.expect_reply(NEW + OLD + NEW, OPENING + b"$1\r\n7\r\n" + OPENING)


def test_transaction_gets_its_errors_at_once(served: Any) -> None:
    queued = b"+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n" + OPENING + b"$1\r\n7\r\n"
    served.connect().expect_reply(b"MULTI\r\n" + NEW + OLD + b"EXEC\r\n", queued)


def test_number_of_waiting_clients_is_limited(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resp_server.pipeline.loading_waits.LOADING_WAIT_S", LONG_S)
    monkeypatch.setattr("resp_server.pipeline.loading_waits.WAITING_CLIENTS_MAX", 1)
    first, second = served.connect(), served.connect()
    first.send(NEW)
    wait_until_waiting(served, 1)
    second.expect_reply(NEW, OPENING)
    open_job(served)
    assert first.read(7) == b"$1\r\nv\r\n"


def test_server_that_loads_all_of_its_jobs_lets_clients_wait_too(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resp_server.pipeline.loading_waits.LOADING_WAIT_S", LONG_S)
    served.call(lambda: served.server.set_loading(True))
    peer = served.connect()
    peer.expect_reply(b"CLIENT ID\r\n" + OLD, b":1\r\n")
    wait_until_waiting(served, 1)
    served.call(lambda: served.server.set_loading(False))
    assert peer.read(7) == b"$1\r\n7\r\n"


def test_proxys_connection_never_waits(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resp_server.pipeline.loading_waits.LOADING_WAIT_S", LONG_S)
    peer = served.connect()
    peer.ask("HELLO", "3")
    peer.ask("STATE", "FOLLOW")
    peer.send(NEW)
    peer.read_until(OPENING)
