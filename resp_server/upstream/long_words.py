"""Which words of a request may be long: values for the upstream, as long as Redis allows. All others have a megabyte.

Keys, channels, patterns, names of commands and all that this process or a server of states handles are compared,
hashed or matched, which takes much longer than to pass a value on. A long value is passed on as the texts in which it
arrived (`LongWord`).
"""

from __future__ import annotations

from collections.abc import Collection

from resp_server.protocol.errors import PlainError
from resp_server.protocol.request_parser import FIRST_WORDS, LONG_WORD_BYTES, LongRequest, Request

# Standard: the default of Redis' `proto-max-bulk-len`.
VALUE_BYTES_MAX = 512 << 20
# Of the first words: a longer one than `LONG_WORD_BYTES` gets an error, a longer one than this ends the connection.
FIRST_WORD_BYTES_MAX = 8 << 20
# Stands for a long word where a request is looked at: no key, number or option is as long.
STAND_IN = b"(a long word)"


def long_words(request: Request) -> Collection[int]:
    """Return the positions of words that only the upstream may get; PlainError if one of the first words is long."""
    if type(request) is not LongRequest or request.size_bytes <= LONG_WORD_BYTES:
        return ()
    if any(len(word) > LONG_WORD_BYTES for word in request[:FIRST_WORDS]):
        raise too_long()
    return request.long_at


def without_long_words(request: Request, long_at: Collection[int]) -> Request:
    """Return a request in which no word is a `LongWord`, to look at it."""
    return [STAND_IN if at in long_at else word for at, word in enumerate(request)]


def too_long() -> PlainError:
    """Return the error for a long word that is no value for the upstream."""
    return PlainError(f"only a value for the upstream may have more than {LONG_WORD_BYTES >> 20} MB")
