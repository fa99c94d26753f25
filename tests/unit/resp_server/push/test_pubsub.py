"""What a client that goes was subscribed to is forgotten in steps, between which it, and others, may come again."""

from __future__ import annotations

import pytest

from resp_server.acl.rules import User
from resp_server.push.pubsub import MessageBatch, PubSub
from resp_server.session.session import Session
from resp_server.session.subscriptions import Way

NAMES = [b"a", b"b", b"c"]


def session(number: int) -> Session:
    return Session(number, "", "", User.default(), 0)


@pytest.fixture
def hub() -> PubSub:
    return PubSub()


@pytest.mark.parametrize("way", Way)
def test_a_client_that_leaves_gets_nothing_more_and_its_names_go_step_by_step(hub: PubSub, way: Way) -> None:
    changed: list[bytes] = []
    hub.on_change = lambda way, name: changed.append(name)
    going, staying = session(1), session(2)
    hub.subscribe(going, way, NAMES)
    hub.subscribe(staying, way, [b"b"])
    changed.clear()
    steps = hub.leave(going)
    assert [hub.sessions(way, name) for name in NAMES] == [[], [staying], []]
    assert changed == []
    assert list(steps) == [None] * 3
    assert (changed, list(hub.names(way))) == ([b"a", b"c"], [b"b"])


@pytest.mark.parametrize("way", Way)
def test_a_client_that_comes_again_while_it_leaves_is_there(hub: PubSub, way: Way) -> None:
    client = session(1)
    hub.subscribe(client, way, NAMES)
    steps = hub.leave(client)
    hub.subscribe(client, way, [b"a", b"c"])
    hub.unsubscribe(client, way, [b"c"])
    assert list(steps) == [None] * 3
    assert list(hub.names(way)) == [b"a"]
    assert hub.sessions(way, b"a") == [client]
    mail = MessageBatch()
    posting = hub.posting_in_shard(mail, b"a", b"x") if way is Way.SHARD else hub.posting(mail, b"a", b"x")
    assert list(posting)
    assert mail.count == 1
