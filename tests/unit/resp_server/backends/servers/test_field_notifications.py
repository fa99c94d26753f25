"""Events of aliases of fields: the fields that are read for each subscriber, and the messages of the replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resp_server.acl.user import User
from resp_server.backends.routing.key_matcher import KeyMatcher
from resp_server.backends.routing.rules import parse_rules
from resp_server.backends.servers.field_names import FieldRules
from resp_server.backends.servers.field_notifications import (
    CHANGES,
    FIELDS_MAX,
    FieldEvent,
    FieldListeners,
    FieldReadError,
    FieldReads,
)
from resp_server.protocol.errors import TryAgainError
from resp_server.protocol.glob import matcher
from resp_server.protocol.replies import encode
from resp_server.protocol.request_parser import Request
from resp_server.push.keyspace_notifications import KEYEVENT, KEYSPACE
from resp_server.push.pubsub import MessageBatch, PubSub
from resp_server.raw_replies.answers import Replies
from resp_server.session.session import Session
from resp_server.session.subscriptions import SubscriptionKind, message
from resp_server.settings.event_classes import classes_of

CHANNEL, PATTERN = SubscriptionKind.CHANNEL, SubscriptionKind.PATTERN
RULES = parse_rules(
    """
[[rule]]
keys = "dash/<account>/apdex"
owner = "state"
state_key = "golden:<account>"
field = "a"

[[rule]]
keys = "facts/<account>/<metric>"
owner = "state"
state_key = "golden:<account>"
field = "<metric>"
""",
    "the test",
)
KEY = b"golden:7"
CHANNELS = [b"__keyspace@0__:dash/7/apdex", b"__keyspace@0__:facts/7/x", b"__keyspace@0__:facts/8/x"]
CHANNELS += [b"__keyspace@0__:other", b"__keyevent@0__:set", b"__keyevent@0__:del", b"__keyevent@0__:lpush"]
PATTERNS = [b"*", b"__key*", b"__keyspace@0__:*/7/*", b"__keyspace@0__:facts/7/[xy]", b"__keyspace@0__:facts/8/*"]
PATTERNS += [b"__keyspace@0__:dash*", b"__keyevent@0__:*", b"session:*"]
NAMES = [(CHANNEL, name) for name in CHANNELS] + [(PATTERN, name) for name in PATTERNS]


class Listening:
    """A client with subscriptions, and what it gets."""

    def __init__(self, events: str = "KEA") -> None:
        self.pubsub, self.session = PubSub(), Session(1, "", "", User.default(), 0)
        self.listeners = FieldListeners(self.pubsub)
        self.pubsub.on_change = lambda kind, name: self.listeners.on_subscription_change(
            kind, name, is_added=name in self.pubsub.names(kind)
        )
        self.listeners.reset(FieldRules(RULES, KeyMatcher((), RULES).decider), classes_of(events))

    def messages(self, event: bytes, fields: Sequence[bytes]) -> bytes:
        """Return the messages after an event of the hash, which now has these fields."""
        found = self.listeners.event_of(KEY, event, RULES)
        batch = MessageBatch()
        if found is not None:
            for _ in self.listeners.post_in_steps(batch, found, [reply_to(each, fields) for each in found.requests()]):
                pass
        return batch.take(self.session)


def reply_to(request: Request, fields: Sequence[bytes]) -> bytes:
    """Return a server's reply to a read of a hash with these fields."""
    if request[0] == b"HTTL":
        return encode([-1 if field in fields else -2 for field in request[4:]], 2)
    return encode([b"0" if len(fields) <= FIELDS_MAX else b"5", list(fields[:FIELDS_MAX])], 2)


def expected(subscribed: Sequence[tuple[SubscriptionKind, bytes]], event: bytes, names: Sequence[bytes]) -> set[bytes]:
    """Return the frames that a client of a Redis with these events of keys gets."""
    found = set()
    for name in names:
        for channel, text in ((KEYSPACE + name, event), (KEYEVENT + event, name)):
            for kind, each in subscribed:
                if each == channel if kind is CHANNEL else matcher(each)(channel):
                    found.add(message(kind, each, channel, text, 2))
    return found


@given(st.lists(st.sampled_from(NAMES)), st.lists(st.sampled_from([b"a", b"x", b"y", b"z"]), unique=True))
def test_subscribers_get_events_of_all_names_that_they_may_match(
    changes: list[tuple[SubscriptionKind, bytes]], fields: list[bytes]
) -> None:
    made, subscribed = Listening(), dict.fromkeys(())
    for kind, name in changes:  # twice the same: subscribed, and unsubscribed again
        if (kind, name) in subscribed:
            made.pubsub.unsubscribe(made.session, kind, [name])
            del subscribed[kind, name]
        else:
            made.pubsub.subscribe(made.session, kind, [name])
            subscribed[kind, name] = None
    names = [b"facts/7/" + field for field in fields] + [b"dash/7/apdex"] * (b"a" in fields)
    frames = made.messages(b"hset", fields)
    every = expected(list(subscribed), b"set", names)
    assert all(frame in frames for frame in every) and len(frames) == sum(map(len, every))
    assert not made.messages(b"lpush", fields) and not made.messages(b"new", fields)
    # Of fields that are gone, those of channels and of rules for one field are known.
    gone = [b"dash/7/apdex"] * (b"a" not in fields)
    gone += [b"facts/7/x"] * (b"x" not in fields and (CHANNEL, b"__keyspace@0__:facts/7/x") in subscribed)
    every = expected(list(subscribed), b"del", gone)
    frames = made.messages(b"hdel", fields)
    assert all(frame in frames for frame in every)
    for name in gone:
        frames = frames.replace(name, b"")
    assert b"apdex" not in frames and b"facts/7/x" not in frames


def test_nothing_is_read_for_channels_that_no_name_matches() -> None:
    made = Listening()
    for kind, name in [(PATTERN, b"__keyspace@0__:facts/8/*"), (CHANNEL, b"__keyspace@0__:facts/8/x")]:
        made.pubsub.subscribe(made.session, kind, [name])
    assert made.listeners.is_needed and made.listeners.event_of(KEY, b"hset", RULES) is None
    made.pubsub.subscribe(made.session, CHANNEL, [b"__keyevent@0__:lpush"])
    assert made.listeners.event_of(KEY, b"hset", RULES) is None
    made.pubsub.subscribe(made.session, CHANNEL, [b"__keyspace@0__:facts/7/x"])
    assert made.listeners.event_of(KEY, b"hset", RULES) == FieldEvent(KEY, CHANGES[b"hset"], RULES, [b"x"], False)


def test_names_have_events_of_database_of_their_rule() -> None:
    made, rules = Listening(), [replace(rule, database=rule.name.startswith("facts") * 3) for rule in RULES]
    made.listeners.reset(FieldRules(rules, KeyMatcher((), rules).decider), classes_of("KEA"))
    for kind, name in [(PATTERN, b"__keyspace@?__:*"), (CHANNEL, b"__keyevent@3__:set")]:
        made.pubsub.subscribe(made.session, kind, [name])
    found = made.listeners.event_of(KEY, b"hset", rules)
    batch, every = MessageBatch(), [(b"__keyspace@0__:dash/7/apdex", b"set"), (b"__keyspace@3__:facts/7/a", b"set")]
    assert found is not None
    for _ in made.listeners.post_in_steps(batch, found, [reply_to(each, [b"a"]) for each in found.requests()]):
        pass
    frames = batch.take(made.session)
    expected = [message(PATTERN, b"__keyspace@?__:*", channel, text, 2) for channel, text in every]
    expected.append(message(CHANNEL, b"__keyevent@3__:set", b"__keyevent@3__:set", b"facts/7/a", 2))
    assert all(each in frames for each in expected) and len(frames) == sum(map(len, expected))
    made.pubsub.unsubscribe(made.session, PATTERN, [b"__keyspace@?__:*"])
    made.pubsub.subscribe(made.session, CHANNEL, [b"__keyspace@3__:facts/7/x", b"__keyspace@0__:facts/7/y"])
    found = made.listeners.event_of(KEY, b"hdel", rules)
    assert found is not None and found.fields == [b"x"]


def test_hash_with_too_many_fields_has_events_of_known_names_only() -> None:
    made, fields = Listening("KA"), [b"x%d" % number for number in range(FIELDS_MAX)]
    made.pubsub.subscribe(made.session, PATTERN, [b"*"])
    assert made.messages(b"hset", fields).count(b"facts/7/") == FIELDS_MAX
    assert not made.messages(b"hset", [*fields, b"more"])
    made.pubsub.subscribe(made.session, CHANNEL, [b"__keyspace@0__:facts/7/x5"])
    assert made.messages(b"hset", [*fields, b"more"]).count(b"facts/7/x5\r\n") == 2


@pytest.mark.parametrize(("events", "is_sent"), [("K$", True), ("Kg", False), ("$", True), ("Kh", False)])
def test_events_of_names_have_classes_of_strings(events: str, is_sent: bool) -> None:
    made = Listening(events)
    made.pubsub.subscribe(made.session, CHANNEL, [b"__keyspace@0__:facts/7/x"])
    assert (made.listeners.event_of(KEY, b"hset", RULES) is not None) is is_sent
    assert bool(made.messages(b"hset", [b"x"])) is (is_sent and "K" in events)
    assert made.listeners.is_hidden(b"hset") is ("h" not in events) and not made.listeners.is_hidden(b"set")


@pytest.mark.parametrize("last", [b"-TRYAGAIN later\r\n", TryAgainError("the server is lost")])
def test_read_that_fails_is_error_in_place_of_replies(last: bytes | Exception) -> None:
    event = FieldEvent(KEY, CHANGES[b"hset"], RULES, [b"x"], False)
    for failure in (None, last):
        reads = FieldReads(event, Replies(count=2))
        arrived = reads.arrived()
        arrived.send(None)  # it waits
        reads.replies.put(0, b"*1\r\n:-1\r\n")
        if failure is None:
            reads.replies.put(1, b"*1\r\n:5\r\n")
            with pytest.raises(StopIteration) as ended:
                arrived.send(None)
            assert ended.value.value == [b"*1\r\n:-1\r\n", b"*1\r\n:5\r\n"]
            continue
        reads.replies.fail(1, failure) if isinstance(failure, Exception) else reads.replies.put(1, failure)
        with pytest.raises(FieldReadError, match="the fields of 'golden:7' cannot be read"):
            arrived.send(None)
