"""The frames that an upstream sends without a request: messages, invalidations, and the lines of MONITOR. Pure.

In RESP3 they are pushes. In RESP2 they are arrays. So their first word identifies them, and only where a subscription
makes them possible. Replies to SUBSCRIBE and the like have the same form, one for each channel.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from resp_server.raw_replies.raw_reply import RawReply, ReplyChunks
from resp_server.raw_replies.reply_splitter import FrameError

CONFIRMATIONS = frozenset(prefix + verb for verb in (b"subscribe", b"unsubscribe") for prefix in (b"", b"p", b"s"))
INVALIDATE = b"invalidate"
MESSAGES = frozenset([b"message", b"pmessage", b"smessage"])
CHANNEL_MESSAGES = frozenset([b"message", b"pmessage"])  # the others are those of shards
# The first word of a frame.
FIRST_WORD = re.compile(rb"[*>]\d+\r\n\$\d+\r\n([a-z-]+)\r\n")
# Redis' clock is past its ninth digit since 2001.
MONITOR_LINE = re.compile(rb"\+\d{10,}\.\d{6} \[")
BULK = re.compile(rb"\$(\d+)\r\n")
# A Redis sends the nil of RESP2 for a client of RESP2 that redirects to one of RESP3.
NILS = (b"_\r\n", b"$-1\r\n")
COUNT = re.compile(rb":(\d+)\r\n\Z")
# Messages of these channels are about keys.
OF_KEYSPACE, OF_KEYEVENT = re.compile(rb"__keyspace@(\d{1,9})__:"), re.compile(rb"__keyevent@(\d{1,9})__:")


class Confirmation(NamedTuple):
    """A reply to SUBSCRIBE or UNSUBSCRIBE of any kind.

    Args:
        left: The subscriptions; those to shards are counted apart.
    """

    is_shard: bool
    left: int


def first_word(frame: RawReply) -> bytes:
    """Return the first word of an array or a push that begins with a short one; else nothing."""
    found = FIRST_WORD.match(_head(frame))
    return b"" if found is None else found[1]


def confirmation_in(frame: RawReply) -> Confirmation | None:
    """Return the confirmation that a frame is; None if it is none."""
    word = first_word(frame)
    if word not in CONFIRMATIONS or not isinstance(frame, bytes):
        return None
    count = COUNT.search(frame)
    return None if count is None else Confirmation(word[:2] == b"ss" or word[:3] == b"sun", int(count[1]))


def is_monitor_line(frame: RawReply) -> bool:
    """Return whether a simple string is a line of MONITOR."""
    return MONITOR_LINE.match(_head(frame)) is not None


def notified_key(frame: RawReply) -> tuple[bytes, bytes] | None:
    """Return the number of the database and the key of a keyspace notification; None for all other frames."""
    if not isinstance(frame, bytes) or b"\r\n__key" not in frame or first_word(frame) not in MESSAGES:
        return None
    *_, channel, text = (b"", *words_in(frame))
    found = OF_KEYSPACE.match(channel)
    if found is not None:
        return found[1], channel[found.end() :]
    found = OF_KEYEVENT.match(channel)
    return None if found is None else (found[1], text)


def is_of_channel(frame: RawReply) -> bool:
    """Return whether a frame is a message of a channel, and no notification."""
    return first_word(frame) in CHANNEL_MESSAGES and notified_key(frame) is None


def invalidated_keys(frame: RawReply) -> Sequence[bytes] | None:
    """Return the keys of an invalidation; None: all keys. FrameError for another frame."""
    _, _, keys = (b"" if isinstance(frame, ReplyChunks) else frame).partition(b"\r\n" + INVALIDATE + b"\r\n")
    if not keys:
        raise FrameError("an invalidation without keys")
    return None if keys in NILS else words_in(keys)


def words_in(frame: bytes) -> Sequence[bytes]:
    """Return the strings of an array or a push of bulk strings; FrameError for another frame."""
    strings, at = [], frame.index(b"\r\n") + 2
    while at < len(frame):
        head = BULK.match(frame, at)
        if head is None:
            raise FrameError("a message, or an invalidation, with a part that is no text")
        start, size = head.end(), int(head[1])
        strings.append(frame[start : start + size])
        at = start + size + 2
    return strings


def in_protocol(frame: bytes, protocol: int) -> bytes:
    """Return the first bytes of a message in a version of the protocol, which its client has changed meanwhile."""
    wanted = b">" if protocol >= 3 else b"*"
    return frame if frame[:1] not in (b">", b"*") else wanted + frame[1:]


def _head(frame: RawReply) -> bytes:
    return frame if isinstance(frame, bytes) else frame.texts[0]
