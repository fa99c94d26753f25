"""Encodes long requests in steps, as chunks that are sent one after another and never joined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from resp_server.protocol.request_parser import CHUNK_ARGUMENT_BYTES, CHUNK_ARGUMENTS, LongArgument, Request
from resp_server.raw_replies.raw_reply import Steps
from resp_server.raw_replies.reply_splitter import pack

# An encoded request: one text, or several.
Packed = bytes | Sequence[bytes]


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
    return texts if size > CHUNK_ARGUMENT_BYTES else b"".join(texts)


def packed_texts(request: Request) -> Iterator[bytes]:
    """Encode a request; its long arguments are not copied."""
    yield b"*%d\r\n" % len(request)
    arguments: list[bytes] = []
    size = 0
    for argument in cast("Sequence[bytes | LongArgument]", request):
        if isinstance(argument, LongArgument):
            yield from _without_count(arguments)
            arguments, size = [], 0
            yield b"$%d\r\n" % len(argument)
            yield from argument.texts
            continue
        arguments.append(argument)
        size += len(argument)
        if len(arguments) >= CHUNK_ARGUMENTS or size >= CHUNK_ARGUMENT_BYTES:
            yield from _without_count(arguments)
            arguments, size = [], 0
    yield from _without_count(arguments)


def _without_count(arguments: list[bytes]) -> Iterator[bytes]:
    if arguments:
        yield pack(arguments).partition(b"\r\n")[2]
