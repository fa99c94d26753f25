"""Which state owns a key: the key formats of all states as one regular expression. Pure, and never changed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from state_backend.model.descriptor import KeyFormat


class OwnedFormat(NamedTuple):
    """A key format of a state. owner: `job:state`."""

    text: str
    owner: str


class KeyMatcher:
    """The owners of keys at one time. patterns: Redis patterns of exactly the keys that have an owner."""

    def __init__(self, formats: Sequence[OwnedFormat] = ()) -> None:
        rows = [(KeyFormat.parse(each.text), each.owner) for each in formats]
        # The longest literal start first: of two formats that cover a key, the more specific one names the owner.
        rows.sort(key=lambda row: -len(row[0].literals[0]))
        patterns = [b"(" + key_pattern(key_format) + b")" for key_format, _ in rows]
        self._pattern = re.compile(b"|".join(patterns), re.DOTALL) if patterns else None
        self._owners = [owner for _, owner in rows]
        self.patterns = [glob_of(key_format) for key_format, _ in rows]

    @property
    def format_count(self) -> int:
        """The number of key formats."""
        return len(self._owners)

    def owner_of(self, key: bytes) -> str | None:
        """Return the state that owns a key, as `job:state`; None: the upstream owns it."""
        match = self._pattern.match(key) if self._pattern is not None else None
        return self._owners[match.lastindex - 1] if match and match.lastindex else None


def key_pattern(key_format: KeyFormat) -> bytes:
    """Return a regular expression (bytes, DOTALL) for exactly the keys of a format, without groups.

    `KeyFormat.pattern` leaves out the literals between columns; here these would take keys of the upstream.
    """
    return b".*".join(re.escape(literal.encode()) for literal in key_format.literals) + rb"\Z"


GLOB_MARKS = re.compile(rb"([*?\[\]\\^])")


def glob_of(key_format: KeyFormat) -> bytes:
    """Return the Redis pattern of a format's keys."""
    return b"*".join(GLOB_MARKS.sub(rb"\\\1", literal.encode()) for literal in key_format.literals)
