"""Servers' replies as undecoded bytes. A short reply is one bytes object, a long one the chunks in which it arrived.

Copying a reply of 256 MB would block the event loop for a quarter of a second. So chunks are never joined. A long reply
is split, merged and sent in steps, chunk by chunk, and other clients are served between the steps.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from resp_server.protocol.replies import STEP_BYTES_MAX, Pending

# Replies up to this size are joined into one bytes object (guess: takes 0.2 ms).
JOINED_BYTES_MAX = 1 << 20
# How the error for a key of another kind begins.
WRONG_TYPE = b"-WRONGTYPE "

Result = TypeVar("Result")
# Work in steps of much less than a millisecond each; the generator returns the result.
Steps = Generator[None, None, Result]


class ReplyChunks:
    """A long reply as a sequence of chunks, `texts`. Never an error: errors are short."""

    __slots__ = ("_size", "texts")

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts
        self._size = sum(map(len, texts))

    def __len__(self) -> int:
        return self._size


RawReply = bytes | ReplyChunks


def raw_reply_of(parts: Sequence[RawReply]) -> RawReply:
    """Return one reply of consecutive parts."""
    is_long = sum(map(len, parts)) > JOINED_BYTES_MAX
    if ReplyChunks in set(map(type, parts)):
        parts = list(chunks_of(parts))
    return ReplyChunks(parts) if is_long else b"".join(parts)  # type: ignore[arg-type]


def chunks_of(parts: Iterable[RawReply]) -> Iterator[bytes]:
    """Iterate over the chunks of replies."""
    for part in parts:
        if isinstance(part, ReplyChunks):
            yield from part.texts
        else:
            yield part


def as_bytes(reply: RawReply) -> bytes:
    """Return a reply as one bytes object. Only for replies that are not long in practice: long ones are copied."""
    return b"".join(reply.texts) if isinstance(reply, ReplyChunks) else reply


def text_of(item: RawReply) -> bytes:
    """Return the text of an encoded bulk string."""
    return as_bytes(item).partition(b"\r\n")[2][:-2]


def is_error(reply: RawReply) -> bool:
    """Return whether a reply is an error."""
    return isinstance(reply, bytes) and reply[:1] == b"-"


def split_header(reply: RawReply) -> tuple[bytes, list[bytes]]:
    """Return the first line of a reply, and the chunks after it."""
    first, *others = reply.texts if isinstance(reply, ReplyChunks) else [reply]
    head, _, body = first.partition(b"\r\n")
    return head, [body, *others]


def result_of(found: RawReply | Steps[RawReply]) -> Steps[RawReply]:
    """Return a result, after its steps if it is computed in steps."""
    if isinstance(found, Generator):
        return (yield from found)
    return found


class RawReplySender:
    """A `ReplyStream` of raw replies: sends them in steps, and frees each chunk after it is sent."""

    pins_epoch = False
    pending: Pending | None = None
    has_started = True  # the replies are complete, so no error can replace them

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
        """Free the chunks that were not sent."""
        self.texts, self._text = iter(()), b""
