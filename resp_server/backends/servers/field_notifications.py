"""Keyspace notifications for hash fields that clients read as keys (`field_names.py`).

A state's event names the hash, not its changed fields. So the proxy reads the fields after the event:

    hset, hexpire, expire, persist    `set`, `expire`, `persist` for each checked field that exists
    hdel, del, hexpired, expired      `del`, `expired` for each checked field that does not exist

The checked fields are:

- the fields whose channel has a subscriber
- the field of each rule with a fixed `field`
- for subscribers of patterns and of `__keyevent@N__:` channels: all fields, if the hash has at most `FIELDS_MAX`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from resp_server.backends.routing.rules import Rule
from resp_server.backends.servers.aliased_keys import may_name
from resp_server.backends.servers.field_names import (
    NO_RULES,
    FieldRules,
    NameInDatabase,
    field_presence_request,
    is_failure,
    present_in,
    texts_in,
)
from resp_server.protocol.errors import client_text
from resp_server.protocol.glob import literal_start
from resp_server.protocol.request_parser import Request
from resp_server.push.keyspace_notifications import EVENTS, heads_of
from resp_server.push.pubsub import MessageBatch, PubSub
from resp_server.raw_replies.answers import Replies
from resp_server.raw_replies.raw_reply import RawReply, Steps, is_error, text_of
from resp_server.raw_replies.reply_splitter import items_of
from resp_server.session.session import Session
from resp_server.session.subscriptions import SubscriptionKind
from resp_server.settings.event_classes import TO_KEYEVENT, TO_KEYSPACE, classes_of

# A subscriber of patterns gets the events of a hash with at most this many fields (guess: a client can use no more).
FIELDS_MAX = 1000
HASH_CLASS = classes_of("h")
HASH_EVENTS = frozenset(event.name for event in EVENTS.values() if event.event_class == HASH_CLASS)


class FieldReadError(Exception):
    """Raised if the fields of a hash cannot be read, so that their events are lost."""


class _Change(NamedTuple):
    """An event of a field's name.

    Args:
        is_present: It is sent for fields that exist, otherwise for fields that do not.
    """

    event: bytes
    event_class: int
    is_present: bool


SET = _Change(b"set", classes_of("$"), True)
EXPIRY_SET = _Change(b"expire", classes_of("g"), True)
DELETED, EXPIRED = _Change(b"del", classes_of("g"), False), _Change(b"expired", classes_of("x"), False)
CHANGES: Mapping[bytes, _Change] = {
    b"hset": SET,
    b"hexpire": EXPIRY_SET,
    b"expire": EXPIRY_SET,
    b"persist": _Change(b"persist", classes_of("g"), True),
    b"hdel": DELETED,
    b"del": DELETED,
    b"hexpired": EXPIRED,
    b"expired": EXPIRED,
}
NAME_CLASSES = SET.event_class | EXPIRY_SET.event_class | EXPIRED.event_class
NAME_EVENTS = frozenset(change.event for change in CHANGES.values())


class FieldEvent(NamedTuple):
    """An event of a hash whose fields have names with subscribers."""

    key: bytes
    change: _Change
    rules: Sequence[Rule]
    fields: Sequence[bytes]
    reads_all: bool

    def chunks(self) -> Iterator[Sequence[bytes]]:
        """Iterate over the fields to check, in batches of at most `FIELDS_MAX`."""
        return (self.fields[index : index + FIELDS_MAX] for index in range(0, len(self.fields), FIELDS_MAX))

    def requests(self) -> Iterator[Request]:
        """Iterate over the reads."""
        yield from (field_presence_request(self.key, chunk) for chunk in self.chunks())
        if self.reads_all:
            yield (b"HSCAN", self.key, b"0", b"COUNT", b"%d" % FIELDS_MAX, b"NOVALUES")


class FieldReads(NamedTuple):
    """The reads for an event, which were sent."""

    event: FieldEvent
    replies: Replies

    async def arrived(self) -> Sequence[RawReply]:
        """Return the replies; FieldReadError if a read has failed."""
        try:
            found = await self.replies
            failure: object = next(filter(is_failure, found), None)
        except Exception as error:
            failure = error
        if failure is not None:
            raise FieldReadError(f"the fields of '{client_text(self.event.key)}' cannot be read: {failure!r}")
        return found


class FieldListeners:
    """The channels and patterns with subscribers that notifications for hash fields may match."""

    def __init__(self, pubsub: PubSub) -> None:
        self._pubsub = pubsub
        self._rules = NO_RULES
        self._classes = 0
        # By state's key: the fields whose names' channels have subscribers.
        self._channels: dict[bytes, dict[bytes, None]] = {}
        # By rule: literal prefixes of subscribed patterns, with the number of subscriptions.
        self._prefixes: dict[str, Counter[bytes]] = {}

    def reset(self, rules: FieldRules, classes: int) -> None:
        """Set the rules that name fields, and the enabled classes of events. Forget all subscriptions."""
        self._rules, self._classes = rules, classes
        self._channels, self._prefixes = {}, {rule.name: Counter() for rule in rules.rules}

    def on_subscription_change(self, kind: SubscriptionKind, name: bytes, *, is_added: bool) -> None:
        """Record that a channel or pattern got its first subscriber (`is_added`) or lost its last one."""
        if not self._rules.rules or kind is SubscriptionKind.SHARD:
            return
        is_pattern = kind is SubscriptionKind.PATTERN
        literal = literal_start(name) if is_pattern else b""
        databases = {rule.database for rule in self._rules.rules}
        for database, heads in ((each, heads_of(each)) for each in databases):
            if not is_pattern and name.startswith(heads.keyspace):
                self._count_channel(database, name.removeprefix(heads.keyspace), is_added=is_added)
            elif is_pattern or (name.startswith(heads.keyevent) and name[len(heads.keyevent) :] in NAME_EVENTS):
                prefix = literal.removeprefix(heads.keyspace) if literal.startswith(heads.keyspace) else b""
                self._count_prefix(kind, name, database, prefix, is_added=is_added)

    def _count_prefix(
        self, kind: SubscriptionKind, name: bytes, database: int, prefix: bytes, *, is_added: bool
    ) -> None:
        for rule in self._rules.rules:
            if rule.database == database and may_name(kind, name, [rule]):
                self._prefixes[rule.name][prefix] += 1 if is_added else -1
                self._prefixes[rule.name] += Counter()  # drops prefixes whose count is 0

    def _count_channel(self, database: int, name: bytes, *, is_added: bool) -> None:
        rule = self._rules.decider(database)(name).rule
        if rule is None or rule.alias is None or rule.name not in self._prefixes:
            return
        key, field = rule.alias.state_key_of(name)
        assert field is not None
        fields = self._channels.setdefault(key, {})
        if is_added:
            fields[field] = None
        else:
            fields.pop(field, None)
        if not fields:
            del self._channels[key]

    @property
    def is_needed(self) -> bool:
        """Return whether events of hashes may be needed."""
        return bool(self._classes & NAME_CLASSES) and bool(self._channels or any(self._prefixes.values()))

    def is_hidden(self, event: bytes) -> bool:
        """Return whether clients must not see a hash's own event: servers send it only for the events of its fields."""
        return event in HASH_EVENTS and bool(self._rules.rules) and not self._classes & HASH_CLASS

    def event_of(self, key: bytes, event: bytes, rules: Sequence[Rule]) -> FieldEvent | None:
        """Return the event of a state's key, if names of its fields by some of the rules may have subscribers."""
        change = CHANGES.get(event)
        if change is None or not self._classes & change.event_class:
            return None
        fields, reads_all, found = dict(self._channels.get(key, {})), False, []
        for rule in rules:
            prefix = rule.alias.alias_prefix(key) if rule.alias is not None and rule.name in self._prefixes else None
            if prefix is None or rule.alias is None:
                continue
            found.append(rule)
            if any(prefix.startswith(each) or each.startswith(prefix) for each in self._prefixes[rule.name]):
                if rule.alias.only_field is not None:
                    fields[rule.alias.only_field] = None
                else:
                    reads_all |= change.is_present
        return FieldEvent(key, change, found, list(fields), reads_all) if found and (fields or reads_all) else None

    def post_in_steps(self, batch: MessageBatch, event: FieldEvent, replies: Sequence[RawReply]) -> Steps[None]:
        """Add the messages of an event, in steps."""
        changed: list[bytes] = []
        for chunk, reply in zip(event.chunks(), replies, strict=False):
            present = set((yield from present_in(reply, chunk)))
            changed += [field for field in chunk if (field in present) is event.change.is_present]
            yield
        if event.reads_all and not is_error(replies[-1]):  # the key is a hash
            cursor, fields = yield from items_of(replies[-1])
            if text_of(cursor) == b"0":
                known = set(event.fields)
                changed += [field for field in (yield from texts_in(fields)) if field not in known]
        for field in changed:
            for name in self._rules.names(event.key, event.rules, field):
                yield from self._post_in_steps(batch, event.change.event, name)
            yield

    def _post_in_steps(self, batch: MessageBatch, event: bytes, found: NameInDatabase) -> Iterator[None]:
        name, heads = found.name, heads_of(found.database)

        def accepts(session: Session) -> bool:
            return session.user.is_unrestricted or session.user.can_read(name)

        if self._classes & TO_KEYSPACE:
            yield from self._pubsub.post_in_steps(batch, heads.keyspace + name, event, accepts)
        if self._classes & TO_KEYEVENT:
            yield from self._pubsub.post_in_steps(batch, heads.keyevent + event, name, accepts)
