"""Hash fields that clients read as keys: by a rule the key `facts/7/errors` is the field `errors` of `golden:facts:7`.

The fields of a hash are not in its key, so they are read. A rule with a fixed `field` needs one field; any other rule
reads all fields of the hash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from resp_server.backends.routing.key_aliases import KeyAlias, StateKey
from resp_server.backends.routing.key_matcher import Decision, all_upstreams
from resp_server.backends.routing.rules import Rule
from resp_server.protocol.glob import literal_start
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.raw_reply import WRONG_TYPE, RawReply, Steps, is_error, text_of
from resp_server.raw_replies.reply_splitter import items_of

# HTTL's answer for a missing field.
ABSENT = b":-2\r\n"
# The number of fields whose names are made in one step (guess: 0.2 ms).
FIELDS_AT_ONCE = 32


class FieldRules(NamedTuple):
    """Rules that name fields.

    Args:
        decider: Returns the function that decides about the keys of a database.
    """

    rules: Sequence[Rule]
    decider: Callable[[int], Callable[[bytes], Decision]]

    def of_hash(self, key: bytes, is_prefix_needed: Callable[[bytes, bool], object]) -> NamedHash | None:
        """Return a key with the rules that name its fields; None: there is none.

        Args:
            is_prefix_needed: Tells whether a needed name may start with this prefix; the second argument is True if the
                prefix is the whole name.
        """
        found = []
        for rule in self.rules:
            assert rule.alias is not None
            prefix = rule.alias.alias_prefix(key)
            if prefix is not None and is_prefix_needed(prefix, rule.alias.only_field is not None):
                found.append(rule)
        return NamedHash(key, found) if found else None

    def names(self, key: bytes, rules: Sequence[Rule], field: bytes) -> Iterator[NameInDatabase]:
        """Iterate over the names of a field of a hash, by some of the rules."""
        for rule in rules:
            assert rule.alias is not None
            name = rule.alias.key_of(StateKey(key, field))
            if name is not None and self.decider(rule.database)(name).rule is rule:
                yield NameInDatabase(rule.database, name)


NO_RULES = FieldRules((), lambda database: all_upstreams)


class NameInDatabase(NamedTuple):
    """A key as clients know it, and the number of its database."""

    database: int
    name: bytes


class NamedHash(NamedTuple):
    """A key of a state, and rules that name its fields if it is a hash."""

    key: bytes
    rules: Sequence[Rule]

    @property
    def only_fields(self) -> Sequence[bytes] | None:
        """The fields that may have names; None: all of them."""
        fields = {rule.alias.only_field for rule in self.rules if rule.alias is not None}
        return None if None in fields else [field for field in fields if field is not None]

    @property
    def request(self) -> Request:
        """The request that lists the hash's fields."""
        fields = self.only_fields
        return (b"HKEYS", self.key) if fields is None else field_presence_request(self.key, fields)

    def fields_in(self, reply: RawReply) -> Steps[Sequence[bytes]]:
        """Return the fields in the reply to `request`."""
        fields = self.only_fields
        if fields is None:
            return (yield from texts_in(reply))
        return (yield from present_in(reply, fields))


def has_fields(rule: Rule) -> bool:
    """Return whether a rule names fields of hashes."""
    return rule.lists_aliases and isinstance(rule.alias, KeyAlias) and rule.alias.field is not None


def field_presence_request(key: bytes, fields: Sequence[bytes]) -> Request:
    """Return a request that tells which of some fields exist. HTTL returns no values, so long values cost nothing."""
    return (b"HTTL", key, b"FIELDS", b"%d" % len(fields), *fields)


def present_in(reply: RawReply, fields: Sequence[bytes]) -> Steps[Sequence[bytes]]:
    """Return the fields that exist, by the reply to `field_presence_request`."""
    if is_error(reply):
        return []
    items = yield from items_of(reply)
    return [field for field, item in zip(fields, items, strict=False) if item != ABSENT]


def texts_in(reply: RawReply) -> Steps[Sequence[bytes]]:
    """Return the texts of an array; an error has none."""
    if is_error(reply):
        return []
    items = yield from items_of(reply)
    found = []
    for number, item in enumerate(items):
        found.append(text_of(item))
        if not number % FIELDS_AT_ONCE:
            yield
    return found


def is_failure(reply: RawReply) -> bool:
    """Return whether a read of fields has failed. A key that is not a hash has no fields, which is not a failure."""
    return isinstance(reply, bytes) and reply[:1] == b"-" and not reply.startswith(WRONG_TYPE)


def may_match(pattern: bytes, prefix: bytes, is_complete: bool) -> bool:
    """Return whether some name with this prefix can match a pattern. Only the pattern's literal start is compared.

    Args:
        is_complete: The prefix is the whole name.
    """
    literal = literal_start(pattern)
    if literal == pattern:
        return pattern == prefix if is_complete else pattern.startswith(prefix)
    return prefix.startswith(literal) or (not is_complete and literal.startswith(prefix))
