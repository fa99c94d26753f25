"""Transactions on a server whose epochs continue: reads at one epoch, limits, and views that are closed."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compat.conformance.wire import request
from compat.waiting import eventually
from resp_server.session import transaction
from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from state_backend.store import pinned_epochs
from state_backend.store.keyspace import Job
from state_backend.store.memory_store import MemoryStore
from tests.builders import apply_epoch
from tests.server.conftest import OtherWorkers
from tests.server.socket_requests import bulk

pytestmark = pytest.mark.pure

STATES = [
    StateDescriptor("temp", key="k", value="v"),
    StateDescriptor("many", key="k", value="v"),
    StateDescriptor("map", key="k", value="v", field="f"),
    StateDescriptor("seen", key="k", member="m"),
    StateDescriptor("top", key="k", member="m", score="s"),
]
PING, PONG = b"*1\r\n$4\r\nPING\r\n", b"+PONG\r\n"
# Several steps of a reply of all of them.
KEYS = 1_200
FIELDS = 1_200
OK, QUEUED = b"+OK\r\n", b"+QUEUED\r\n"


def lines(*requests: str) -> bytes:
    return b"".join(b"%b\r\n" % each.encode() for each in requests)


class Epochs:
    """A job whose values all say which epoch they are of."""

    def __init__(self, server: Any, path: Path) -> None:
        self._server = server
        self.store = LmdbStore(path, "g2")
        self.epoch = -1
        self.publish([Change("many", Op.PUT, b"job:many:%d" % each, value=b"x") for each in range(KEYS)])
        job = Job("job", "g2", STATES, self.store)
        server.call(lambda: server.server.context.keyspace.put(job))

    def report(self, error: str) -> None:
        """Report as an applier does that the log cannot be read, or, without an error, that it can."""

        def set_error() -> None:
            keyspace = self._server.server.context.keyspace
            keyspace.jobs["job"] = replace(keyspace.jobs["job"], error=error)
            keyspace.on_epoch("job")

        self._server.call(set_error)

    def begin_anew(self) -> None:
        """Serve another generation, whose only key has the value 9."""
        store = MemoryStore("g3")
        apply_epoch(store, STATES, [Change("temp", Op.PUT, b"job:temp:a", value=b"9")], 0, term=3)

        def put() -> None:
            keyspace = self._server.server.context.keyspace
            keyspace.put(replace(keyspace.jobs["job"], generation="g3", store=store))

        self._server.call(put)

    def publish(self, more: list[Change] | None = None, keys: str = "ab") -> int:
        """Publish an epoch; return its number. The server is told as an applier tells it."""
        self.epoch += 1
        value = b"%d" % self.epoch
        changes = [Change("temp", Op.PUT, f"job:temp:{each}".encode(), value=value) for each in keys]
        changes += [Change("map", Op.PUT, b"job:map:m", b"f%d" % each, value) for each in range(FIELDS)]
        apply_epoch(self.store, STATES, [*changes, *(more or [])], self.epoch, clock_ms=self.epoch + 1)
        self._server.call(lambda: self._server.server.context.keyspace.on_epoch("job"))
        return self.epoch


@pytest.fixture
def server(serve: Callable[..., Any]) -> Any:
    return serve()


@pytest.fixture
def epochs(server: Any, tmp_path: Path) -> Iterator[Epochs]:
    made = Epochs(server, tmp_path)
    yield made
    server.call(server.server.context.close)
    made.store.close()


@pytest.fixture
def tiny_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each turn end after one step, and each step after one command, however fast the machine is."""
    monkeypatch.setattr("resp_server.client.connection.TURN_NS_MAX", 0)
    monkeypatch.setattr("resp_server.pipeline.exec_runner.STEP_NS_MAX", 0)


def test_long_transaction_reads_one_epoch(
    server: Any, epochs: Epochs, tiny_turns: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch is published, and another client answered, between any two commands of the transaction."""
    peer, other = server.connect(), server.connect()
    backend = server.server.pipeline.backend
    answer_queued = backend.answer_queued
    published: list[int] = []

    def noted(context: Any, request: Any) -> Any:
        reply = answer_queued(context, request)
        value = b"%d" % (epochs.epoch + 1)
        changes = [Change("temp", Op.PUT, b"job:temp:%b" % each, value=value) for each in (b"a", b"b")]
        epochs.epoch += 1
        apply_epoch(epochs.store, STATES, changes, epochs.epoch, clock_ms=epochs.epoch + 1)
        published.append(epochs.epoch)
        return reply

    monkeypatch.setattr(backend, "answer_queued", noted)
    commands = [
        "GET job:temp:a",
        "HGETALL job:map:m",
        "MGET job:temp:a job:temp:b",
        "KEYS job:temp:*",
        "GET job:temp:b",
    ]
    peer.expect_reply(lines("MULTI", *commands), OK + QUEUED * len(commands))
    peer.send(lines("EXEC"))
    reply = bulk(b"0")
    peer.expect(b"*5\r\n" + reply + b"*%d\r\n" % (2 * FIELDS))
    other.expect_reply(PING, PONG)
    pairs = peer.read(sum(len(bulk(b"f%d" % each)) + len(reply) for each in range(FIELDS)))
    assert pairs.count(b"\r\n0\r\n") == FIELDS
    peer.expect(b"*2\r\n" + reply * 2 + b"*2\r\n")
    assert sorted(peer.read(2 * len(bulk(b"job:temp:a"))).split()[1::2]) == [b"job:temp:a", b"job:temp:b"]
    peer.expect(reply)
    assert len(published) == len(commands)
    peer.expect_reply(lines("GET job:temp:a"), bulk(b"%d" % epochs.epoch))


def test_others_are_answered_while_long_transaction_is_run(server: Any, tiny_turns: None) -> None:
    slow, quick = server.connect(), server.connect()
    slow.expect_reply(lines("MULTI", *["GET job:temp:1"] * 500), OK + QUEUED * 500)
    order: list[str] = []
    pipeline = server.server.pipeline
    run, ping = pipeline.backend.answer_queued, pipeline.reply_to

    def noted_run(context: Any, request: Any) -> Any:
        order.append("queued")
        if order.count("queued") == 1:
            quick.send(lines("ECHO x"))  # it waits from now on
        return run(context, request)

    def noted_ping(context: Any, request: Any) -> Any:
        order.append(request[0].decode())
        return ping(context, request)

    pipeline.backend.answer_queued = noted_run
    pipeline.reply_to = noted_ping
    slow.send(lines("EXEC"))
    assert quick.read(7) == bulk(b"x")
    slow.expect(b"*500\r\n" + bulk(b"1") * 500)
    assert order[0] == "EXEC"
    assert order.index("ECHO") < order.index("queued") + 100


def test_too_long_transaction_is_refused_and_nothing_of_it_is_run(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction, "QUEUED_REQUESTS_MAX", 3)
    refused = b"-ERR a transaction may have 3 commands and 64 MiB; split it\r\n"
    aborted = b"-EXECABORT Transaction discarded because of previous errors.\r\n"
    peer = server.connect()
    peer.expect_reply(lines("MULTI", *["PING"] * 5, "EXEC"), OK + QUEUED * 3 + refused + QUEUED + aborted)
    monkeypatch.setattr(transaction, "QUEUED_REQUESTS_MAX", 100)
    monkeypatch.setattr(transaction, "QUEUED_BYTES_MAX", 1 << 20)
    too_long = b"*2\r\n$3\r\nGET\r\n$1048576\r\n" + b"x" * 1048576 + b"\r\n"
    refused = refused.replace(b"3 commands and 64", b"100 commands and 1")
    peer.expect_reply(lines("MULTI") + too_long + lines("EXEC"), OK + refused + aborted)
    peer.expect_reply(lines("MULTI", "GET job:temp:1", "EXEC"), OK + QUEUED + b"*1\r\n" + bulk(b"1"))


def test_each_request_of_transaction_is_answered_at_once(server: Any) -> None:
    peer = server.connect()
    get, reply = request("GET", "job:temp:1"), bulk(b"1")
    for words, replies in ((("MULTI",), OK), (("GET", "job:temp:1"), QUEUED), (("EXEC",), b"*1\r\n" + reply)):
        peer.expect_reply(request(*words), replies)
    peer.expect_reply(get + request("MULTI") + get, reply + OK + QUEUED)
    peer.expect_reply(request("EXEC"), b"*1\r\n" + reply)


def test_watched_keys_are_limited(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = server.connect()
    peer.expect_reply(lines("WATCH " + " ".join(f"job:temp:{each}" for each in range(1000))), OK)
    peer.expect_reply(lines("WATCH job:temp:1 job:temp:1"), OK)
    monkeypatch.setattr("resp_server.session.transaction.WATCHED_KEYS_MAX", 1001)
    peer.expect_reply(lines("WATCH job:temp:1000"), OK)
    peer.expect_reply(
        lines("WATCH job:temp:1001"), b"-ERR a client may watch 1001 keys of 16 MiB; UNWATCH, or watch fewer\r\n"
    )
    peer.send(lines("INFO clients"))
    found = b""
    while b"total_watched_keys:1001\r\n" not in found:
        found += peer.read(1)
    assert b"watching_clients:1\r\n" in found
    while b"total_blocking_keys_on_nokey:0\r\n\r\n" not in found:
        found += peer.read(1)
    peer.expect_reply(lines("MULTI", "PING", "EXEC"), OK + QUEUED + b"*1\r\n" + PONG)


def test_client_that_leaves_during_exec_leaves_no_view_open(
    serve: Callable[..., Any], tmp_path: Path, tiny_turns: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(output_pause_bytes=1)
    epochs = Epochs(server, tmp_path)
    closed: list[object] = []
    close = type(server.server.context.view).close

    def noted(view: Any) -> None:
        closed.append(view)
        close(view)

    monkeypatch.setattr(type(server.server.context.view), "close", noted)
    peer = server.connect()
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    peer.send(lines("MULTI", *["HGETALL job:map:m"] * 200, "EXEC"))
    assert peer.read(len(OK + QUEUED * 200)) == OK + QUEUED * 200
    assert peer.read(10)  # of what EXEC answers
    peer.socket.close()
    eventually(lambda: server.call(lambda: len(server.server._connections)), lambda count: count == 0)
    assert len(closed) == 1
    server.call(server.server.context.close)
    epochs.store.close()


def test_exec_waits_for_command_that_queries_other_workers(server: Any) -> None:
    workers = OtherWorkers(server)
    peer, other = server.connect(), server.connect()
    peer.send(lines("MULTI", "PING", "CLIENT LIST TYPE pubsub", "PING", "EXEC", "PING"))
    head = OK + QUEUED * 3 + b"*3\r\n" + PONG
    assert peer.read(len(head)) == head
    workers.wait_for_queries()
    other.expect_reply(PING, PONG)
    workers.answer()
    assert peer.read(len(PONG) * 2 + 6) == b"$0\r\n\r\n" + PONG * 2


# -- WATCH -------------------------------------------------------------------------------------------------------------

RUN = OK + QUEUED + b"*1\r\n" + PONG
NOT_RUN = OK + QUEUED + b"*-1\r\n"
MULTI_PING_EXEC = lines("MULTI", "PING", "EXEC")


def test_changed_keys_of_kept_epochs_decide_about_watched_keys(server: Any, epochs: Epochs) -> None:
    peer = server.connect()
    for _ in range(8):
        peer.expect_reply(lines("WATCH job:temp:a job:map:m job:temp:none"), OK)
        epochs.publish(keys="b")
        peer.expect_reply(MULTI_PING_EXEC, NOT_RUN)  # each epoch changes the map
    peer.expect_reply(lines("WATCH job:temp:a job:temp:none"), OK)
    for _ in range(8):
        epochs.publish(keys="b")
    peer.expect_reply(MULTI_PING_EXEC, RUN)
    peer.expect_reply(lines("WATCH job:temp:a"), OK)
    epochs.publish(keys="a")
    peer.expect_reply(MULTI_PING_EXEC, NOT_RUN)
    peer.expect_reply(MULTI_PING_EXEC, RUN)


def test_watch_of_unknown_keys_compares_small_values_only(server: Any, epochs: Epochs) -> None:
    large = [Change("temp", Op.PUT, b"job:temp:large", value=b"x" * 100_000)]
    epochs.publish(large)
    small, changed, big = server.connect(), server.connect(), server.connect()
    small.expect_reply(lines("WATCH job:temp:b job:temp:none job:many:7"), OK)
    changed.expect_reply(lines("WATCH job:temp:a"), OK)
    big.expect_reply(lines("WATCH job:temp:large"), OK)
    for _ in range(20):
        epochs.publish(keys="a")
    small.expect_reply(MULTI_PING_EXEC, RUN)
    changed.expect_reply(MULTI_PING_EXEC, NOT_RUN)
    big.expect_reply(MULTI_PING_EXEC, NOT_RUN)


def test_watched_set_has_changed_if_its_members_or_their_scores_have(server: Any, epochs: Epochs) -> None:
    members = [Change("seen", Op.PUT, b"job:seen:a", b"ann", b""), Change("top", Op.PUT, b"job:top:a", b"ann", b"1")]
    others = [change._replace(key=change.key[:-1] + b"b") for change in members]
    epochs.publish(members + others)
    same, member, score = server.connect(), server.connect(), server.connect()
    same.expect_reply(lines("WATCH job:seen:b job:top:b"), OK)
    member.expect_reply(lines("WATCH job:seen:a"), OK)
    score.expect_reply(lines("WATCH job:top:a"), OK)
    epochs.publish([Change("seen", Op.PUT, b"job:seen:a", b"bob", b""), members[1]._replace(value=b"2"), *others])
    for _ in range(20):  # until it is not known any more which keys those epochs changed
        epochs.publish()
    same.expect_reply(MULTI_PING_EXEC, RUN)
    member.expect_reply(MULTI_PING_EXEC, NOT_RUN)
    score.expect_reply(MULTI_PING_EXEC, NOT_RUN)


def test_watched_key_that_expires_ends_transaction(server: Any, epochs: Epochs) -> None:
    clock = [server.server.context.clock()]
    server.server.context.clock = lambda: clock[0]
    at = clock[0] + 1_000
    epochs.publish(
        [
            Change("temp", Op.PUT, b"job:temp:soon", value=b"1", expire_at_ms=at),
            Change("map", Op.PUT, b"job:map:soon", b"f", b"1", expire_at_ms=at),
            Change("map", Op.PUT, b"job:map:soon", b"g", b"1"),
        ]
    )
    for key in ("job:temp:soon", "job:map:soon"):
        early, late = server.connect(), server.connect()
        early.expect_reply(lines(f"WATCH {key}"), OK)
        early.expect_reply(MULTI_PING_EXEC, RUN)
        late.expect_reply(lines(f"WATCH {key}"), OK)
        clock[0] = at
        late.expect_reply(MULTI_PING_EXEC, NOT_RUN)
        late.expect_reply(lines(f"WATCH {key}"), OK)  # expired before it was watched
        late.expect_reply(MULTI_PING_EXEC, RUN)
        clock[0] = at - 1_000


def test_watched_keys_of_rebuilt_job_are_compared_by_value(server: Any, epochs: Epochs, tmp_path: Path) -> None:
    same, other = server.connect(), server.connect()
    epochs.publish()
    same.expect_reply(lines("WATCH job:temp:a"), OK)
    other.expect_reply(lines("WATCH job:temp:b"), OK)
    anew = LmdbStore(tmp_path / "anew", "g2")
    changes = [Change("temp", Op.PUT, b"job:temp:a", value=b"1"), Change("temp", Op.PUT, b"job:temp:b", value=b"7")]
    apply_epoch(anew, STATES, changes, 1, term=2, clock_ms=9)
    server.call(lambda: server.server.context.keyspace.put(Job("job", "g2", STATES, anew)))
    same.expect_reply(MULTI_PING_EXEC, RUN)
    other.expect_reply(MULTI_PING_EXEC, NOT_RUN)
    server.call(server.server.context.close)
    anew.close()


# -- STATE AT ----------------------------------------------------------------------------------------------------------


def reads_at(term: int, epoch: int, *commands: str, clock_ms: int = 1) -> bytes:
    return lines(f"STATE AT job {term} {epoch} {clock_ms}", "MULTI", *commands, "EXEC")


def exec_reply(*replies: bytes) -> bytes:
    return OK + OK + QUEUED * len(replies) + b"*%d\r\n" % len(replies) + b"".join(replies)


def test_epochs_are_held_from_request_until_time_limit(server: Any, epochs: Epochs) -> None:
    clock = [server.server.context.clock()]
    server.server.context.clock = lambda: clock[0]
    peer = server.connect()
    for _ in range(3):
        epochs.publish()
    two = ("GET job:temp:a", "GET job:temp:b")
    peer.expect_reply(reads_at(1, 2, *two), OK + OK + QUEUED * 2 + b"-NOEPOCH job 1:3\r\n")
    peer.expect_reply(reads_at(1, 3, *two), exec_reply(bulk(b"3"), bulk(b"3")))
    for _ in range(9):
        epochs.publish()
    for epoch in range(5, 13):
        peer.expect_reply(reads_at(1, epoch, *two), exec_reply(*[bulk(b"%d" % epoch)] * 2))
    held = b"-NOEPOCH job " + b",".join(b"1:%d" % epoch for epoch in range(5, 13)) + b"\r\n"
    peer.expect_reply(reads_at(1, 4, *two), OK + OK + QUEUED * 2 + held)
    peer.expect_reply(reads_at(2, 12, *two), OK + OK + QUEUED * 2 + held)
    clock[0] += pinned_epochs.PINNED_MS_MAX + 1
    peer.expect_reply(reads_at(1, 5, *two), exec_reply(bulk(b"5"), bulk(b"5")))  # no time alone ends it
    epochs.publish()
    peer.expect_reply(reads_at(1, 11, *two), OK + OK + QUEUED * 2 + b"-NOEPOCH job 1:12,1:13\r\n")
    peer.expect_reply(reads_at(1, 12, *two), exec_reply(bulk(b"12"), bulk(b"12")))
    context = server.server.context
    assert server.call(lambda: len(context.epochs.pinned.epochs()["job"])) == 2
    server.call(lambda: server.server.sweep(clock[0] + pinned_epochs.IDLE_MS_MAX))
    assert server.call(context.epochs.pinned.epochs) == {}


def test_transaction_at_epoch_reads_it_to_its_end_after_it_is_unpinned(
    server: Any, epochs: Epochs, tiny_turns: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = server.connect()
    peer.expect_reply(reads_at(1, 0, "GET job:temp:a"), exec_reply(bulk(b"0")))
    epochs.publish()
    backend = server.server.pipeline.backend
    answer_queued = backend.answer_queued

    def noted(context: Any, request: Any) -> Any:
        server.server.context.epochs.pinned.close()
        return answer_queued(context, request)

    monkeypatch.setattr(backend, "answer_queued", noted)
    peer.send(reads_at(1, 0, "GET job:temp:a", "HVALS job:map:m", "GET job:temp:b", "DBSIZE"))
    expected = exec_reply(bulk(b"0"), b"*%d\r\n" % FIELDS + bulk(b"0") * FIELDS, bulk(b"0"), b":%d\r\n" % (KEYS + 3))
    assert peer.read(len(expected)) == expected


def test_transaction_at_epoch_takes_clock_that_it_is_given(server: Any, epochs: Epochs) -> None:
    now_ms = server.server.context.clock()
    epochs.publish([Change("temp", Op.PUT, b"job:temp:soon", value=b"1", expire_at_ms=now_ms + 1_000)])
    peer = server.connect()
    for clock_ms, left in ((now_ms, 1000), (now_ms + 999, 1), (now_ms + 1000, -2), (now_ms + 5000, -2)):
        peer.expect_reply(reads_at(1, 1, "PTTL job:temp:soon", clock_ms=clock_ms), exec_reply(b":%d\r\n" % left))
    peer.expect_reply(lines("PTTL job:temp:soon"), b":1000\r\n")


def test_requested_epoch_applies_to_next_transaction_and_to_every_job(server: Any, epochs: Epochs) -> None:
    peer = server.connect()
    peer.expect_reply(reads_at(1, 0, "GET job:temp:a"), exec_reply(bulk(b"0")))
    epochs.publish()
    peer.expect_reply(lines("MULTI", "GET job:temp:a", "EXEC"), OK + QUEUED + b"*1\r\n" + bulk(b"1"))
    peer.expect_reply(lines("STATE AT job 1 0 1", "MULTI", "DISCARD"), OK * 3)
    peer.expect_reply(lines("MULTI", "GET job:temp:a", "EXEC"), OK + QUEUED + b"*1\r\n" + bulk(b"1"))
    for missing in ("STATE AT 1", "STATE AT other 1 0 1", "STATE AT job 1 1 other 1 1 1"):
        peer.expect_reply(lines(missing, "MULTI", "PING", "EXEC"), OK + OK + QUEUED + b"-NOEPOCH job 1:0,1:1\r\n")
    peer.expect_reply(lines("STATE AT job 1 0"), b"-ERR syntax error\r\n")
    peer.expect_reply(lines("STATE AT job 1 x 1"), b"-ERR value is not an integer or out of range\r\n")
    refused = b"-ERR Command not allowed inside a transaction\r\n"
    aborted = b"-EXECABORT Transaction discarded because of previous errors.\r\n"
    peer.expect_reply(lines("MULTI", "STATE AT job 1 0 1", "EXEC"), OK + refused + aborted)


def test_version_watched_on_one_connection_is_expected_on_another(server: Any, epochs: Epochs) -> None:
    one, other = server.connect(), server.connect()

    def mark(key: str) -> str:
        one.send(lines(f"STATE MARK {key}"))
        head = b""
        while not head.endswith(b"\r\n"):
            head += one.read(1)
        return str(one.read(int(head[1:]) + 2)[:-2].decode())

    for _ in range(2):
        marks = {key: mark(key) for key in ("job:temp:a", "job:temp:b", "job:temp:none")}
        words = b"".join(bulk(each.encode()) for pair in marks.items() for each in pair)
        expect = b"*%d\r\n" % (2 + 2 * len(marks)) + bulk(b"STATE") + bulk(b"EXPECT") + words
        other.expect_reply(expect + MULTI_PING_EXEC + MULTI_PING_EXEC, OK + RUN + RUN)
        epochs.publish(keys="b")
        other.expect_reply(expect + MULTI_PING_EXEC + MULTI_PING_EXEC, OK + NOT_RUN + RUN)
        other.expect_reply(expect + lines("UNWATCH") + MULTI_PING_EXEC, OK * 2 + RUN)
    refused = b"-ERR a mark is the unchanged reply of STATE MARK\r\n"
    other.expect_reply(lines("STATE EXPECT job:temp:a nonsense", "STATE EXPECT a"), refused + b"-ERR syntax error\r\n")


# -- STATE HOLD --------------------------------------------------------------------------------------------------------


def test_proxy_reads_job_with_unreadable_log_at_earlier_epoch(server: Any, epochs: Epochs) -> None:
    peer, proxy = server.connect(), server.connect()
    proxy.expect_reply(lines("STATE FOLLOW"), OK + b">4\r\n$5\r\nepoch\r\n$3\r\njob\r\n:1\r\n:0\r\n")
    peer.expect_reply(reads_at(1, 0, "GET job:temp:a"), exec_reply(bulk(b"0")))
    for _ in range(2):
        epochs.publish()
    peer.expect_reply(lines("STATE HOLD job 1 1"), b"-NOEPOCH job 1:0,1:1,1:2\r\n")  # its log can be read
    epochs.report("the log cannot be read")
    assert b"$7\r\nstalled\r\n$3\r\njob\r\n$11\r\n1:0,1:1,1:2\r\n" in proxy.read_until(b"1:2\r\n")
    peer.expect_reply(lines("STATE HOLD job 1 7", "STATE HOLD other 1 1"), b"-NOEPOCH job 1:0,1:1,1:2\r\n" * 2)
    peer.expect_reply(lines("STATE HOLD job 1", "STATE HOLD job 1 2 3"), b"-ERR syntax error\r\n" * 2)
    peer.expect_reply(lines("GET job:temp:a", "STATE HOLD job 1 1"), bulk(b"2") + OK)
    peer.expect_reply(lines("GET job:temp:a"), bulk(b"1"))
    assert proxy.read_until(b":1\r\n:1\r\n").endswith(b"epoch\r\n$3\r\njob\r\n:1\r\n:1\r\n")
    peer.expect_reply(lines("MULTI", "GET job:temp:b", "EXEC"), OK + QUEUED + b"*1\r\n" + bulk(b"1"))
    peer.expect_reply(lines("HVALS job:map:m"), b"*%d\r\n" % FIELDS + bulk(b"1") * FIELDS)
    peer.expect_reply(lines("STATE HOLD job 1 0"), OK)
    peer.expect_reply(lines("GET job:temp:a"), bulk(b"0"))
    peer.expect_reply(lines("STATE HOLD job"), OK)
    peer.expect_reply(lines("GET job:temp:a"), bulk(b"2"))
    peer.expect_reply(lines("STATE HOLD job 1 0"), OK)
    epochs.report("")
    peer.expect_reply(lines("GET job:temp:a"), bulk(b"2"))
    assert proxy.read_until(b"stalled\r\n$3\r\njob\r\n_\r\n")
    epochs.publish()
    peer.expect_reply(lines("GET job:temp:a"), bulk(b"3"))
    epochs.report("the log cannot be read")
    peer.expect_reply(lines("STATE HOLD job 1 2", "PING"), OK + b"+PONG\r\n")
    peer.expect_reply(lines("GET job:temp:a"), bulk(b"2"))
    epochs.begin_anew()
    peer.expect_reply(lines("GET job:temp:a"), bulk(b"9"))
    peer.expect_reply(lines("MULTI", "GET job:temp:a", "EXEC"), OK + QUEUED + b"*1\r\n" + bulk(b"9"))
    epochs.report("")
    peer.expect_reply(lines("GET job:temp:a"), bulk(b"9"))
