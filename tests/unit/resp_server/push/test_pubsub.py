"""The subscriptions of a client that leaves are removed in steps, between which it, and others, may subscribe again."""

from __future__ import annotations

import pytest

from resp_server.acl.user import User
from resp_server.push.pubsub import MessageBatch, PubSub
from resp_server.session.session import Session
from resp_server.session.subscriptions import SubscriptionKind

NAMES = [b"a", b"b", b"c"]


def session(number: int) -> Session:
    return Session(number, "", "", User.default(), 0)


@pytest.fixture
def pubsub() -> PubSub:
    return PubSub()


@pytest.mark.parametrize("kind", SubscriptionKind)
def test_leaving_client_gets_nothing_and_its_names_go_in_steps(pubsub: PubSub, kind: SubscriptionKind) -> None:
    changed: list[bytes] = []
    pubsub.on_change = lambda kind, name: changed.append(name)
    going, staying = session(1), session(2)
    pubsub.subscribe(going, kind, NAMES)
    pubsub.subscribe(staying, kind, [b"b"])
    changed.clear()
    steps = pubsub.leave(going)
    assert [pubsub.sessions(kind, name) for name in NAMES] == [[], [staying], []]
    assert changed == []
    assert list(steps) == [None] * 3
    assert (changed, list(pubsub.names(kind))) == ([b"a", b"c"], [b"b"])


@pytest.mark.parametrize("kind", SubscriptionKind)
def test_client_that_returns_while_it_leaves_stays_connected(pubsub: PubSub, kind: SubscriptionKind) -> None:
    client = session(1)
    pubsub.subscribe(client, kind, NAMES)
    steps = pubsub.leave(client)
    pubsub.subscribe(client, kind, [b"a", b"c"])
    pubsub.unsubscribe(client, kind, [b"c"])
    assert list(steps) == [None] * 3
    assert list(pubsub.names(kind)) == [b"a"]
    assert pubsub.sessions(kind, b"a") == [client]
    mail = MessageBatch()
    posting = (
        pubsub.post_to_shard_in_steps(mail, b"a", b"x")
        if kind is SubscriptionKind.SHARD
        else pubsub.post_in_steps(mail, b"a", b"x")
    )
    assert list(posting)
    assert mail.count == 1
