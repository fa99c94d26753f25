"""Encodes long requests in steps, as pieces that are sent one after another and never joined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from resp_server.forwarding.raw_replies import Steps
from resp_server.forwarding.reply_splitter import pack
from resp_server.protocol.request_parser import LongWord, Request

# An encoded request: one text, or several.
Packed = bytes | Sequence[bytes]
# The words that are encoded in one step (guess: 0.1 ms).
WORDS_AT_ONCE = 1024
WORDS_BYTES_AT_ONCE = 256 << 10


def texts_of(packed: Packed) -> Sequence[bytes]:
    """Return an encoded request as texts."""
    return (packed,) if isinstance(packed, bytes) else packed


def size_of(packed: Packed) -> int:
    """Return the size of an encoded request."""
    return len(packed) if isinstance(packed, bytes) else sum(map(len, packed))


def prefixed(before: bytes, packed: Packed) -> Packed:
    """Return an encoded request with another one in front of it."""
    return before + packed if isinstance(packed, bytes) else [before, *packed]


def pack_in_steps(request: Request) -> Steps[Packed]:
    """Encode a request in steps, as one text if it is short, else as several."""
    texts: list[bytes] = []
    size = 0
    for some in packed_texts(request):
        texts.append(some)
        size += len(some)
        yield
    return texts if size > WORDS_BYTES_AT_ONCE else b"".join(texts)


def packed_texts(request: Request) -> Iterator[bytes]:
    """Encode a request; its long words are not copied."""
    yield b"*%d\r\n" % len(request)
    words: list[bytes] = []
    size = 0
    for word in cast("Sequence[bytes | LongWord]", request):
        if isinstance(word, LongWord):
            yield from _without_count(words)
            words, size = [], 0
            yield b"$%d\r\n" % len(word)
            yield from word.texts
            continue
        words.append(word)
        size += len(word)
        if len(words) >= WORDS_AT_ONCE or size >= WORDS_BYTES_AT_ONCE:
            yield from _without_count(words)
            words, size = [], 0
    yield from _without_count(words)


def _without_count(words: list[bytes]) -> Iterator[bytes]:
    if words:
        yield pack(words).partition(b"\r\n")[2]
