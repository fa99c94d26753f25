"""The clients' names of fields of states' hashes: `facts/7/errors` is the field `errors` of `golden:facts:7`.

A state's key does not say which fields it has, so the fields have to be read. A rule whose `field` has no placeholder
needs to know of one field only; for any other rule, all fields of the hash are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from resp_server.forwarding.raw_replies import RawReply, Steps, is_error, text_of
from resp_server.forwarding.reply_splitter import items_of
from resp_server.protocol.glob import literal_start
from resp_server.protocol.request_parser import Request
from resp_server.upstream.key_matcher import Decision
from resp_server.upstream.mapped_names import NameMapping, StateName
from resp_server.upstream.rules import Rule

# The reply about a key that is no hash: it has no fields, so it has no such names.
WRONG_TYPE = b"-WRONGTYPE"
# In the reply to HTTL.
ABSENT = b":-2\r\n"
# Fields whose names are made in one step (guess: 0.2 ms).
FIELDS_AT_ONCE = 32


class FieldRules(NamedTuple):
    """Rules with names of fields. decide: about keys of the rules' database."""

    rules: Sequence[Rule]
    decide: Callable[[bytes], Decision]

    def of_hash(self, key: bytes, may_begin: Callable[[bytes, bool], object]) -> NamedHash | None:
        """Return a key with the rules that name its fields; None: there is none.

        may_begin: tells whether names may be needed that begin so; its second argument: it is a whole name.
        """
        found = []
        for rule in self.rules:
            assert rule.mapping is not None
            start = rule.mapping.name_start(key)
            if start is not None and may_begin(start, rule.mapping.only_field is not None):
                found.append(rule)
        return NamedHash(key, found) if found else None

    def names(self, key: bytes, rules: Sequence[Rule], field: bytes) -> Iterator[bytes]:
        """Iterate over the names of a field of a hash, by some of the rules."""
        for rule in rules:
            assert rule.mapping is not None
            name = rule.mapping.key_of(StateName(key, field))
            if name is not None and self.decide(name).rule is rule:
                yield name


class NamedHash(NamedTuple):
    """A key of a state, and rules that name its fields if it is a hash."""

    key: bytes
    rules: Sequence[Rule]

    @property
    def only_fields(self) -> Sequence[bytes] | None:
        """The fields that may have names; None: all of them."""
        fields = {rule.mapping.only_field for rule in self.rules if rule.mapping is not None}
        return None if None in fields else [each for each in fields if each is not None]

    @property
    def request(self) -> Request:
        """The read of the fields that the hash has."""
        fields = self.only_fields
        return (b"HKEYS", self.key) if fields is None else presence_of(self.key, fields)

    def fields_in(self, reply: RawReply) -> Steps[Sequence[bytes]]:
        """Return the fields in the reply to `request`."""
        fields = self.only_fields
        if fields is None:
            return (yield from texts_in(reply))
        return (yield from present_in(reply, fields))


def has_fields(rule: Rule) -> bool:
    """Tell whether a rule names fields of hashes."""
    return rule.lists_names and isinstance(rule.mapping, NameMapping) and rule.mapping.field is not None


def presence_of(key: bytes, fields: Sequence[bytes]) -> Request:
    """Return the read of whether a hash has some fields: it takes no value, however long the values are."""
    return (b"HTTL", key, b"FIELDS", b"%d" % len(fields), *fields)


def present_in(reply: RawReply, fields: Sequence[bytes]) -> Steps[Sequence[bytes]]:
    """Return the fields that a hash has, by the reply to `presence_of`."""
    if is_error(reply):
        return []
    items = yield from items_of(reply)
    return [field for field, item in zip(fields, items, strict=False) if item != ABSENT]


def texts_in(reply: RawReply) -> Steps[Sequence[bytes]]:
    """Return the texts of an array; none of an error."""
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
    """Tell whether a read of fields has failed. A key that is no hash is not a failure."""
    return isinstance(reply, bytes) and reply[:1] == b"-" and not reply.startswith(WRONG_TYPE)


def may_match(pattern: bytes, start: bytes, is_whole: bool) -> bool:
    """Tell whether a pattern may match a name that begins so, by the pattern's text before its first special character.

    is_whole: the name is this text.
    """
    literal = literal_start(pattern)
    if literal == pattern:
        return pattern == start if is_whole else pattern.startswith(start)
    return start.startswith(literal) or (not is_whole and literal.startswith(start))
