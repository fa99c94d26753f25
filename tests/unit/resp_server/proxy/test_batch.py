"""Replies that a proxy's client gets together are in their order, and none is from before one in front of it."""

from __future__ import annotations

import pytest

from resp_server.acl.rules import User
from resp_server.proxy.batch import ReplyBatch
from resp_server.session.epoch_feed import ReplyEpochs
from resp_server.session.session import Session

OLD: ReplyEpochs = ({"job": (1, 1)},)
NEW: ReplyEpochs = ({"job": (1, 2)},)


def test_what_comes_last_is_asked_for_when_what_is_before_it_is_there_and_as_new_as_it_has_to_be() -> None:
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
    ("passed_s", "told", "end"),
    [(0.5, NEW, b"+1\r\n"), (1.0, OLD, b"-TRYAGAIN the servers are not at the same epoch\r\n")],
    ids=["in time", "too late"],
)
def test_what_is_behind_is_asked_for_again_until_its_time_is_over(
    passed_s: float, told: ReplyEpochs, end: bytes
) -> None:
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
    batch.put(second, b"+1\r\n", told)
    assert batch.is_resolved
    assert batch.joined() == b"+1\r\n" + end
