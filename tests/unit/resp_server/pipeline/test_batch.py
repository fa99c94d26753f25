"""Replies of a batch are in order, and no later reply is of an earlier epoch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from resp_server.acl.user import User
from resp_server.pipeline.batch import ReplyBatch
from resp_server.protocol.replies import ReplyStream, Sliced, SlicedEncoder
from resp_server.raw_replies.reply_sinks import UnansweredError
from resp_server.session.epochs import ReplyEpochs
from resp_server.session.session import Session

OLD: ReplyEpochs = ({"job": (1, 1)},)
NEW: ReplyEpochs = ({"job": (1, 2)},)


def test_last_part_is_requested_at_epoch_of_others() -> None:
    batch = ReplyBatch(Session(1, "", "", User.default(), 0), lambda: 0.0, 1.0, lambda error: b"-ERR\r\n")
    asked: list[str] = []
    first, second, last = (batch.expect() for _ in range(3))
    batch.set_retry(second, lambda: asked.append("second"))
    batch.before_last_reply(lambda: asked.append("last"))
    batch.seal()
    batch.put(first, b"+1\r\n", NEW)
    batch.put(second, b"+0\r\n", OLD)
    assert asked == ["second"]
    batch.put(second, b"+1\r\n", NEW)
    assert asked == ["second", "last"]
    assert not batch.is_resolved
    batch.put(last, b"*0\r\n", NEW)
    assert batch.is_resolved
    assert batch.joined() == b"+1\r\n+1\r\n*0\r\n"


@pytest.mark.parametrize(
    ("passed_s", "epochs", "end"),
    [(0.5, NEW, b"+1\r\n"), (1.0, OLD, b"-TRYAGAIN the servers are not at the same epoch\r\n")],
    ids=["in time", "too late"],
)
def test_late_parts_are_requested_again_until_timeout(passed_s: float, epochs: ReplyEpochs, end: bytes) -> None:
    clock = iter([*[0.0] * 100, passed_s])
    batch = ReplyBatch(Session(1, "", "", User.default(), 0), lambda: next(clock), 1.0, lambda error: b"-ERR\r\n")
    asked: list[int] = []
    first, second = batch.expect(), batch.expect()
    batch.set_retry(second, lambda: asked.append(second))
    batch.seal()
    batch.put(first, b"+1\r\n", NEW)
    for _ in range(100):
        batch.put(second, b"+0\r\n", OLD)
    assert asked == [second] * 100
    assert not batch.is_resolved
    batch.put(second, b"+1\r\n", epochs)
    assert batch.is_resolved
    assert batch.joined() == b"+1\r\n" + end


def batch_of_a_client() -> ReplyBatch:
    return ReplyBatch(Session(1, "", "", User.default(), 0), lambda: 0.0, 1.0, lambda error: b"-ERR\r\n")


def last_reply(released: list[str]) -> SlicedEncoder:
    chunks: list[Sequence[bytes]] = [[b"x"], [b"y"]]
    return SlicedEncoder(Sliced(iter(chunks), lambda: released.append("released"), count=2), 2)


def test_reply_in_steps_ends_batch() -> None:
    batch, released = batch_of_a_client(), list[str]()
    batch.add(b"+first\r\n")
    index = batch.expect()
    batch.end_with(last_reply(released))
    batch.put(index, b"+second\r\n")
    assert batch.is_resolved
    stream: ReplyStream = batch.make()
    sent, has_started = [], []
    while not stream.is_done:
        has_started.append(stream.has_started)
        sent.append(stream.step())
    assert b"".join(sent) == b"+first\r\n+second\r\n*2\r\n$1\r\nx\r\n$1\r\ny\r\n"
    assert not has_started[0]  # an error of the last reply may still be sent after the others
    assert not released
    stream.close()
    assert released == ["released"]


def test_last_reply_is_released_if_client_leaves() -> None:
    batch, released = batch_of_a_client(), list[str]()
    batch.expect()
    batch.end_with(last_reply(released))
    batch.abandon()
    assert released == ["released"]


def test_last_reply_is_released_if_connection_ends_before_it() -> None:
    batch, released = batch_of_a_client(), list[str]()
    batch.add(b"+first\r\n")
    index = batch.expect()
    batch.end_with(last_reply(released))
    batch.fail(index, UnansweredError("cut"))
    assert batch.make() == b"+first\r\n" and released == ["released"]
