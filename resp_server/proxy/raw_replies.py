"""Servers' replies as undecoded bytes: one text, or the chunks in which a long reply arrived, which are never joined.

To copy a reply of 256 MB would block the event loop for a quarter of a second. So a long reply is split, merged with
others and sent chunk by chunk, each step in a turn of its own.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from resp_server.protocol.replies import STEP_BYTES_MAX

# Together in one text up to here (guess: 0.2 ms).
JOINED_BYTES_MAX = 1 << 20

Result = TypeVar("Result")
# Work in steps of well below a millisecond, and what comes of it.
Steps = Generator[None, None, Result]


class ReplyChunks:
    """A long answer as the texts that it is made of. It is no error: these are short."""

    __slots__ = ("_size", "texts")

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts
        self._size = sum(map(len, texts))

    def __len__(self) -> int:
        return self._size


RawReply = bytes | ReplyChunks


def raw_reply_of(parts: Sequence[RawReply]) -> RawReply:
    """Return one answer made of parts."""
    is_long = sum(map(len, parts)) > JOINED_BYTES_MAX
    if ReplyChunks in set(map(type, parts)):
        parts = list(chunks_of(parts))
    return ReplyChunks(parts) if is_long else b"".join(parts)  # type: ignore[arg-type]


def chunks_of(parts: Iterable[RawReply]) -> Iterator[bytes]:
    """Return the texts of answers."""
    for part in parts:
        if isinstance(part, ReplyChunks):
            yield from part.texts
        else:
            yield part


def as_bytes(answer: RawReply) -> bytes:
    """Return an answer as one text: for what is short but in theory."""
    return b"".join(answer.texts) if isinstance(answer, ReplyChunks) else answer


def is_error(answer: RawReply) -> bool:
    """Tell whether an answer is an error."""
    return isinstance(answer, bytes) and answer[:1] == b"-"


def split_header(answer: RawReply) -> tuple[bytes, list[bytes]]:
    """Return the first line of an answer, and the texts behind it."""
    first, *others = answer.texts if isinstance(answer, ReplyChunks) else [answer]
    head, _, body = first.partition(b"\r\n")
    return head, [body, *others]


def done(found: RawReply | Steps[RawReply]) -> Steps[RawReply]:
    """Do what may be work in steps."""
    if isinstance(found, Generator):
        return (yield from found)
    return found


class RawReplySender:
    """A reply that is sent a step at a time, as `SlicedEncoder` sends others. What was sent is let go of."""

    holds_epoch = False
    has_begun = True  # nothing can go wrong any more

    def __init__(self, texts: Iterable[bytes], size: int) -> None:
        self.texts = iter(texts)
        self._text: Any = b""
        self.held_bytes = size
        self.is_done = False

    def step(self) -> bytes:
        """Return what is sent next."""
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
        self.held_bytes -= size
        return b"".join(out)

    def close(self) -> None:
        """Let go of what was not sent."""
        self.texts, self._text = iter(()), b""
