"""Which words of a request may be long: values for the upstream, up to `VALUE_BYTES_MAX`. All others have a megabyte.

Keys, channels, patterns, names of commands and all that this process or a server of states handles are compared,
hashed or matched, which takes much longer than to pass a value on.
"""

from __future__ import annotations

from collections.abc import Collection

from resp_server.protocol.errors import PlainError
from resp_server.protocol.request_parser import LongRequest, Request

WORD_BYTES_MAX = 1 << 20
# A longer one would take more than 20 ms of one turn of the event loop (measured: 2.5 ms for each megabyte, in copies).
VALUE_BYTES_MAX = 8 << 20
# The name of a command, and its first argument: a subcommand, a key, a channel or a script.
FIRST_WORDS = 2


def long_words(request: Request) -> Collection[int]:
    """Return the positions of words that only the upstream may get; PlainError if one of the first words is long."""
    if type(request) is not LongRequest or request.size_bytes <= WORD_BYTES_MAX:
        return ()
    found = [at for at, word in enumerate(request) if len(word) > WORD_BYTES_MAX]
    if found and found[0] < FIRST_WORDS:
        raise too_long()
    return found


def too_long() -> PlainError:
    """Return the error for a long word that is no value for the upstream."""
    return PlainError(f"only a value for the upstream may have more than {WORD_BYTES_MAX >> 20} MB")
