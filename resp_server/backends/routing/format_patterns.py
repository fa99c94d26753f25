"""Key formats as patterns: regular expressions, globs, and whether one covers another. Pure."""

from __future__ import annotations

import re

from state_backend.model.descriptor import KeyFormat

GLOB_MARKS = re.compile(rb"([*?\[\]\\^])")
# A byte that no literal has: literals are UTF-8.
UNUSED_BYTE = b"\xff"


def key_pattern(key_format: KeyFormat) -> bytes:
    """Return a regular expression (bytes, DOTALL) for exactly the keys of a format, without groups that capture.

    `KeyFormat.pattern` leaves out the literals between columns, so it would match keys of the upstream. Here, a literal
    between columns is matched at its first position, which loses no match. So the time is proportional to the key's
    length: with `.*`, a key of colons would take the length to the power of the number of columns.
    """
    first, *others = [re.escape(literal.encode()) for literal in key_format.literals]
    if not others:
        return first + rb"\Z"
    between = [b"(?>.*?%b)" % literal for literal in others[:-1]]
    return first + b"".join(between) + b".*" + others[-1] + rb"\Z"


def glob_of(key_format: KeyFormat) -> bytes:
    """Return the Redis pattern of a format's keys."""
    return b"*".join(GLOB_MARKS.sub(rb"\\\1", literal.encode()) for literal in key_format.literals)


def may_share_keys(first: KeyFormat, second: KeyFormat) -> bool:
    """Return whether two formats may have keys in common, by the literals with which they begin."""
    return first.prefix.startswith(second.prefix) or second.prefix.startswith(first.prefix)


def covers(wide: KeyFormat, narrow: KeyFormat) -> bool:
    """Return whether a format covers each key of another one.

    It does if it matches a key of the narrow format in which each column is a byte that no literal has: only a column
    of the wide format matches this byte, and a column matches any other text, too.
    """
    key = UNUSED_BYTE.join(literal.encode() for literal in narrow.literals)
    return re.match(key_pattern(wide), key, re.DOTALL) is not None
