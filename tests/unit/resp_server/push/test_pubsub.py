"""What a client that goes was subscribed to is forgotten in steps, between which it, and others, may come again."""

from __future__ import annotations

import pytest

from resp_server.acl.rules import User
from resp_server.push.pubsub import MessageBatch, PubSub
from resp_server.session.session import Session
from resp_server.session.subscriptions import SubscriptionKind

NAMES = [b"a", b"b", b"c"]


def session(number: int) -> Session:
    return Session(number, "", "", User.default(), 0)


@pytest.fixture
def hub() -> PubSub:
    return PubSub()


@pytest.mark.parametrize("kind", SubscriptionKind)
def test_a_client_that_leaves_gets_nothing_more_and_its_names_go_step_by_step(
    hub: PubSub, kind: SubscriptionKind
) -> None:
    changed: list[bytes] = []
    hub.on_change = lambda kind, name: changed.append(name)
    going, staying = session(1), session(2)
    hub.subscribe(going, kind, NAMES)
    hub.subscribe(staying, kind, [b"b"])
    changed.clear()
    steps = hub.leave(going)
    assert [hub.sessions(kind, name) for name in NAMES] == [[], [staying], []]
    assert changed == []
    assert list(steps) == [None] * 3
    assert (changed, list(hub.names(kind))) == ([b"a", b"c"], [b"b"])


@pytest.mark.parametrize("kind", SubscriptionKind)
def test_a_client_that_comes_again_while_it_leaves_is_there(hub: PubSub, kind: SubscriptionKind) -> None:
    client = session(1)
    hub.subscribe(client, kind, NAMES)
    steps = hub.leave(client)
    hub.subscribe(client, kind, [b"a", b"c"])
    hub.unsubscribe(client, kind, [b"c"])
    assert list(steps) == [None] * 3
    assert list(hub.names(kind)) == [b"a"]
    assert hub.sessions(kind, b"a") == [client]
    mail = MessageBatch()
    posting = (
        hub.posting_in_shard(mail, b"a", b"x") if kind is SubscriptionKind.SHARD else hub.posting(mail, b"a", b"x")
    )
    assert list(posting)
    assert mail.count == 1
