"""The subscriptions of one connection, and the frames of pub/sub.

RESP2  *3 message <channel> <text>         RESP3  the same as a push, `>3` and `>4`
       *4 pmessage <pattern> <channel> <text>
       *3 smessage <shard channel> <text>
       *3 subscribe <channel> <count>      and so on: replies, one for each channel or pattern
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from functools import lru_cache

from resp_server.protocol.errors import GenericError

# The subscriptions of one client, and the length of a name or pattern (guesses: Redis has no limits). Each pattern is
# matched with the channel of each message.
SUBSCRIPTIONS_MAX = 16_384
SUBSCRIBED_BYTES_MAX = 16 << 20
NAME_BYTES_MAX = 1024
# The last replies, which are not encoded again (guess: many clients subscribe to the same few channels).
REPLIES_MAX = 1024


class SubscriptionKind(Enum):
    """The kinds of subscriptions: to channels, to patterns of channel names, or to shard channels."""

    CHANNEL = b""
    PATTERN = b"p"
    SHARD = b"s"

    # Members are compared by identity. Enum's own hash is a function in Python, which takes longer than a look-up.
    __hash__ = object.__hash__


# The same by names of their own: to find a member of an Enum takes as long as the rest of a short function.
CHANNEL, PATTERN, SHARD = SubscriptionKind


class Subscriptions:
    """The channels, patterns and shard channels of one connection, in the order of subscribing.

    Attributes:
        by_kind: The names of each kind; `add` and `remove` change them.
    """

    def __init__(self) -> None:
        self._channels: dict[bytes, None] = {}
        self._patterns: dict[bytes, None] = {}
        self._shards: dict[bytes, None] = {}
        self.by_kind: Mapping[SubscriptionKind, dict[bytes, None]] = {
            CHANNEL: self._channels,
            PATTERN: self._patterns,
            SHARD: self._shards,
        }
        self._bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self.by_kind.values()))

    def add(self, kind: SubscriptionKind, name: bytes) -> None:
        """Add a name; it may be there already."""
        if name not in self.by_kind[kind]:
            self.by_kind[kind][name] = None
            self._bytes += len(name)

    def remove(self, kind: SubscriptionKind, name: bytes) -> bool:
        """Remove a name; False if it is not there."""
        if name not in self.by_kind[kind]:
            return False
        del self.by_kind[kind][name]
        self._bytes -= len(name)
        return True

    def count(self, kind: SubscriptionKind) -> int:
        """Return the count for replies: channels and patterns together, shard channels apart."""
        return len(self._shards) if kind is SHARD else len(self._channels) + len(self._patterns)

    def check_limits(self, kind: SubscriptionKind, names: Sequence[bytes]) -> None:
        """Raise GenericError if a client would have too many subscriptions."""
        new = {name for name in names if name not in self.by_kind[kind]}
        if len(self) + len(new) > SUBSCRIPTIONS_MAX or self._bytes + sum(map(len, new)) > SUBSCRIBED_BYTES_MAX:
            raise self.limit_error()
        for name in new:
            check_name(name)

    def limit_error(self) -> GenericError:
        """Return the error for too many subscriptions."""
        return GenericError(
            f"a client may be subscribed to {SUBSCRIPTIONS_MAX} channels and patterns of "
            f"{SUBSCRIBED_BYTES_MAX >> 20} MiB; unsubscribe from some, or use a pattern"
        )


def check_name(name: bytes) -> None:
    """Raise GenericError for a channel name or pattern that is too long."""
    if len(name) > NAME_BYTES_MAX:
        raise GenericError(f"the name of a channel, or a pattern, may have {NAME_BYTES_MAX} bytes; one has {len(name)}")


@lru_cache(maxsize=REPLIES_MAX)
def subscription_reply(verb: bytes, name: bytes | None, count: int, protocol: int) -> bytes:
    """Return the reply to SUBSCRIBE or UNSUBSCRIBE of any kind, for one channel."""
    start = b"%b3\r\n$%d\r\n%b\r\n" % (b">" if protocol >= 3 else b"*", len(verb), verb)
    if name is None:
        return b"%b%b:%d\r\n" % (start, b"_\r\n" if protocol >= 3 else b"$-1\r\n", count)
    return b"%b$%d\r\n%b\r\n:%d\r\n" % (start, len(name), name, count)


def message(kind: SubscriptionKind, pattern: bytes, channel: bytes, text: bytes, protocol: int) -> bytes:
    """Return the frame of a message for one kind of subscription; `pattern` is used for patterns only."""
    frame_type = b">" if protocol >= 3 else b"*"
    body = b"$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(channel), channel, len(text), text)
    if kind is SubscriptionKind.PATTERN:
        return b"%b4\r\n$8\r\npmessage\r\n$%d\r\n%b\r\n%b" % (frame_type, len(pattern), pattern, body)
    return b"%b3\r\n$%d\r\n%bmessage\r\n%b" % (frame_type, 7 + len(kind.value), kind.value, body)
