"""Aliases: clients know a state's key by another name, such as `dash/<account>/apdex` for `golden:byAccount:<account>`.

Both names are key formats with the same placeholders. A placeholder takes the shortest text that fits, the last one all
that is left. With `field`, a key is one field of a hash of the state. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from resp_server.command.policies import policy_of
from resp_server.command.policy import FieldKind
from resp_server.protocol.request_parser import LongRequest, Request
from resp_server.raw_replies.raw_reply import RawReply, as_bytes
from state_backend.model.descriptor import KeyFormat

NO_VALUES: Mapping[str, bytes] = {}


class StateKey(NamedTuple):
    """A key of a state, or one field of it, by the state's own name.

    Args:
        field: The field; None: the whole key.
    """

    key: bytes
    field: bytes | None


@dataclass(frozen=True)
class KeyAlias:
    """The names by which clients know the states' keys of one rule, or fields of these keys.

    Args:
        keys: The keys as clients know them.
        state_key: The keys as the state has them.
        field: The field of the state's key; None: the whole key.
    """

    keys: KeyFormat
    state_key: KeyFormat
    field: KeyFormat | None = None

    def state_key_of(self, key: bytes) -> StateKey:
        """Return the state's name of a key that the rule covers."""
        values = _values(self._of_key, self.keys, key) or NO_VALUES
        return StateKey(_text(self.state_key, values), None if self.field is None else _text(self.field, values))

    def key_of(self, name: StateKey) -> bytes | None:
        """Return the clients' name of a state's key, or of a field; None: it has none."""
        values = _values(self._of_state_key, self.state_key, name.key)
        of_field = NO_VALUES
        if self.field is not None and name.field is not None:
            found = _values(self._of_field, self.field, name.field)
            values, of_field = (None, NO_VALUES) if found is None else (values, found)
        if values is None:
            return None
        key = _text(self.keys, {**values, **of_field})
        return key if self.state_key_of(key) == name else None

    @property
    def only_field(self) -> bytes | None:
        """The only field with a name; None: all fields that fit, or whole keys."""
        return None if self.field is None or self.field.columns else self.field.prefix

    def alias_prefix(self, state_key: bytes) -> bytes | None:
        """Return the prefix of the names of a hash's fields; None: its fields have no names."""
        values = _values(self._of_state_key, self.state_key, state_key)
        if values is None:
            return None
        prefix = self.keys.prefix
        for column, literal in zip(self.keys.columns, self.keys.literals[1:], strict=True):
            if column not in values:
                break
            prefix += values[column] + literal.encode()
        return prefix

    def mistakes(self) -> list[str]:
        """Return the fault of the placeholders."""
        used = [*self.state_key.columns, *(self.field.columns if self.field is not None else ())]
        found = []
        for columns, what in ((self.keys.columns, "'keys'"), (used, "'state_key' and 'field'")):
            twice = sorted({column for column in columns if list(columns).count(column) > 1})
            found += [f"the placeholder <{column}> stands twice in {what}" for column in twice]
        found += [
            f"the placeholder <{column}> of 'keys' is in no name of the state"
            for column in self.keys.columns
            if column not in used
        ]
        found += [f"the placeholder <{column}> is not in 'keys'" for column in used if column not in self.keys.columns]
        return found

    @cached_property
    def _of_key(self) -> re.Pattern[bytes]:
        return _capturing(self.keys)

    @cached_property
    def _of_state_key(self) -> re.Pattern[bytes]:
        return _capturing(self.state_key)

    @cached_property
    def _of_field(self) -> re.Pattern[bytes]:
        assert self.field is not None
        return _capturing(self.field)


def _capturing(key_format: KeyFormat) -> re.Pattern[bytes]:
    """Return a regular expression for a format's keys, with a group for each column; linear, as `key_pattern`."""
    first, *others = [re.escape(literal.encode()) for literal in key_format.literals]
    if not others:
        return re.compile(first + rb"\Z")
    between = b"".join(b"(?>(.*?)%b)" % literal for literal in others[:-1])
    return re.compile(first + between + b"(.*)" + others[-1] + rb"\Z", re.DOTALL)


def _values(pattern: re.Pattern[bytes], key_format: KeyFormat, key: bytes) -> Mapping[str, bytes] | None:
    match = pattern.match(key)
    return None if match is None else dict(zip(key_format.columns, match.groups(), strict=True))


def _text(key_format: KeyFormat, values: Mapping[str, bytes]) -> bytes:
    parts = [key_format.prefix]
    for column, literal in zip(key_format.columns, key_format.literals[1:], strict=True):
        parts += [values.get(column, b""), literal.encode()]
    return b"".join(parts)


# Turns the replies to the reads of a state into the reply to the client's request.
ConvertReplies = Callable[[Sequence[RawReply]], RawReply]


class FieldRead(NamedTuple):
    """A read of a field, in place of one of a key.

    Args:
        of_key: A read of the whole key, whose reply is needed as well.
    """

    request: Request
    convert: ConvertReplies | None = None
    of_key: Request | None = None


class StateRead(NamedTuple):
    """The states' part of a read of a key that they answer if they have it.

    Args:
        exists: The request whose reply says whether the states have the key.
        reads: The reads of its value; none if they do not serve the command.
        convert: Makes the reply of those to `reads`; without it, the only one is the reply.
    """

    exists: Request
    reads: Sequence[Request]
    convert: ConvertReplies | None = None

    def reply(self, replies: Sequence[RawReply]) -> RawReply:
        """Return the reply to the client's read, by those to `reads`."""
        return replies[0] if self.convert is None else self.convert(replies)


def exists_request(name: StateKey) -> Request:
    """Return the request that tells whether a state has a key, or a field of it."""
    return (b"EXISTS", name.key) if name.field is None else (b"HEXISTS", name.key, name.field)


def field_read(name: str, request: Request, key: bytes, field: bytes) -> FieldRead | None:
    """Return the read of a field for a client's read of one key; None: there is none for this command."""
    command = policy_of(name).field_command
    if command is None:
        return None
    if command.kind is FieldKind.TIME:
        of_key = name.upper().encode(), key
        return FieldRead((command.name, key, b"FIELDS", b"1", field), _earlier_end, of_key)
    return FieldRead((command.name, key, field), _type_of if command.kind is FieldKind.TYPE else None)


# Replies about when a key expires.
NEVER, MISSING = b":-1\r\n", b":-2\r\n"


def _type_of(replies: Sequence[RawReply]) -> RawReply:
    reply = as_bytes(replies[0])
    return {b":1\r\n": b"+string\r\n", b":0\r\n": b"+none\r\n"}.get(reply, reply)


def _earlier_end(replies: Sequence[RawReply]) -> RawReply:
    """Return the earlier expiry of a field and its hash. A missing key counts as a missing field."""
    of_field, of_key = map(as_bytes, replies)
    if of_field[:1] == b"-":
        return of_field
    if not of_field.startswith(b"*1\r\n") or MISSING in (of_field[4:], of_key):
        return MISSING
    ends = [each for each in (of_field[4:], of_key) if each != NEVER]
    return min(ends, key=lambda each: int(each[1:])) if ends else NEVER


def with_state_keys(request: Request, state_keys: Mapping[int, StateKey]) -> Request:
    """Return a request with the states' keys in place of aliases.

    Args:
        state_keys: The states' keys, by the position of their aliases.
    """
    made = list(request)
    for at, state_key in state_keys.items():
        made[at] = state_key.key
    return LongRequest(made, request.size_bytes) if type(request) is LongRequest else made
