"""Servers' replies as undecoded bytes: one text, or the chunks in which a long reply arrived, which are never joined.

Copying a reply of 256 MB would block the event loop for a quarter of a second. So a long reply is split, merged with
others and sent chunk by chunk, each step in a turn of its own.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from resp_server.protocol.replies import STEP_BYTES_MAX, Pending

# Replies up to this size are joined into one text (guess: takes 0.2 ms).
JOINED_BYTES_MAX = 1 << 20

Result = TypeVar("Result")
# Work in steps of well below a millisecond each, and its result.
Steps = Generator[None, None, Result]


class ReplyChunks:
    """A long reply as a sequence of texts. Never an error: errors are short."""

    __slots__ = ("_size", "texts")

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts
        self._size = sum(map(len, texts))

    def __len__(self) -> int:
        return self._size


RawReply = bytes | ReplyChunks


def raw_reply_of(parts: Sequence[RawReply]) -> RawReply:
    """Join parts to one reply."""
    is_long = sum(map(len, parts)) > JOINED_BYTES_MAX
    if ReplyChunks in set(map(type, parts)):
        parts = list(chunks_of(parts))
    return ReplyChunks(parts) if is_long else b"".join(parts)  # type: ignore[arg-type]


def chunks_of(parts: Iterable[RawReply]) -> Iterator[bytes]:
    """Iterate over the texts of replies."""
    for part in parts:
        if isinstance(part, ReplyChunks):
            yield from part.texts
        else:
            yield part


def as_bytes(reply: RawReply) -> bytes:
    """Return a reply as one text. For replies that are long in theory only."""
    return b"".join(reply.texts) if isinstance(reply, ReplyChunks) else reply


def is_error(reply: RawReply) -> bool:
    """Tell whether a reply is an error."""
    return isinstance(reply, bytes) and reply[:1] == b"-"


def split_header(reply: RawReply) -> tuple[bytes, list[bytes]]:
    """Return the first line of a reply, and the texts after it."""
    first, *others = reply.texts if isinstance(reply, ReplyChunks) else [reply]
    head, _, body = first.partition(b"\r\n")
    return head, [body, *others]


def result_of(found: RawReply | Steps[RawReply]) -> Steps[RawReply]:
    """Return a result; if it is computed in steps, run them."""
    if isinstance(found, Generator):
        return (yield from found)
    return found


class RawReplySender:
    """Sends a raw reply in steps, as `SlicedEncoder` does with other replies. Frees each text once it is sent."""

    pins_epoch = False
    pending: Pending | None = None
    has_started = True  # no error can occur any more

    def __init__(self, texts: Iterable[bytes], size: int) -> None:
        self.texts = iter(texts)
        self._text: Any = b""
        self.buffered_bytes = size
        self.is_done = False

    def step(self) -> bytes:
        """Return the next bytes to send."""
        out: list[bytes] = []
        size = 0
        while size < STEP_BYTES_MAX:
            if not self._text:
                text = next(self.texts, None)
                if text is None:
                    self.is_done = True
                    break
                self._text = text if len(text) <= STEP_BYTES_MAX else memoryview(text)
            out.append(self._text[:STEP_BYTES_MAX])
            size += len(out[-1])
            self._text = self._text[STEP_BYTES_MAX:]
        self.buffered_bytes -= size
        return b"".join(out)

    def close(self) -> None:
        """Free the texts that were not sent."""
        self.texts, self._text = iter(()), b""
