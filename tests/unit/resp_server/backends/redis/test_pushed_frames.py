"""The frames that an upstream sends without a request."""

from __future__ import annotations

import pytest

from resp_server.backends.redis.pushed_frames import (
    confirmation_in,
    first_word,
    in_protocol,
    invalidated_keys,
    is_monitor_line,
    notified_key,
    words_in,
)
from resp_server.raw_replies.raw_reply import ReplyChunks
from resp_server.raw_replies.reply_splitter import FrameError
from resp_server.session.subscriptions import SubscriptionKind, message, subscription_reply

CHANNEL, PATTERN, SHARD = SubscriptionKind.CHANNEL, SubscriptionKind.PATTERN, SubscriptionKind.SHARD


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("verb", [b"subscribe", b"psubscribe", b"unsubscribe", b"punsubscribe"])
def test_confirmation_has_number_of_subscriptions(verb: bytes, protocol: int) -> None:
    assert confirmation_in(subscription_reply(verb, b":9", 17, protocol)) == (False, 17)
    assert confirmation_in(subscription_reply(b"s" + verb.lstrip(b"p"), None, 0, protocol)) == (True, 0)


def test_other_frames_confirm_nothing() -> None:
    frames = [message(CHANNEL, b"", b"subscribe", b":1", 2), b"+OK\r\n", b"*0\r\n", b"*1\r\n$9\r\nsubscribe\r\n"]
    assert [confirmation_in(each) for each in frames] == [None] * 4


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize(
    ("kind", "channel", "text", "key"),
    [
        (CHANNEL, b"__keyspace@0__:a:b", b"set", (b"0", b"a:b")),
        (PATTERN, b"__keyspace@15__:", b"del", (b"15", b"")),
        (PATTERN, b"__keyevent@0__:set", b"a\r\n", (b"0", b"a\r\n")),
        (CHANNEL, b"__keyspace@x__:a", b"set", None),
        (CHANNEL, b"a", b"__keyspace@0__:a", None),
        (SHARD, b"x\r\n__keyspace@0__:a", b"set", None),
    ],
)
def test_key_of_notification_is_found(
    kind: SubscriptionKind, channel: bytes, text: bytes, key: tuple[bytes, bytes] | None, protocol: int
) -> None:
    assert notified_key(message(kind, b"p*", channel, text, protocol)) == key


def test_reply_is_no_notification() -> None:
    assert notified_key(b"*2\r\n$1\r\na\r\n$16\r\n__keyspace@0__:a\r\n") is None
    assert notified_key(ReplyChunks([message(CHANNEL, b"", b"__keyspace@0__:a", b"x" * 100, 2)])) is None


@pytest.mark.parametrize("nil", [b"_\r\n", b"$-1\r\n"])
def test_invalidation_has_keys_or_is_about_all(nil: bytes) -> None:
    begin = b">2\r\n$10\r\ninvalidate\r\n"
    assert invalidated_keys(begin + nil) is None
    assert invalidated_keys(begin + b"*2\r\n$1\r\na\r\n$0\r\n\r\n") == [b"a", b""]


@pytest.mark.parametrize("part", [b"$-1\r\n", b":-30\r\n", b"*1\r\n$1\r\na\r\n", b"#t\r\n"])
def test_part_that_is_no_text_is_error(part: bytes) -> None:
    with pytest.raises(FrameError):
        words_in(b"*2\r\n$1\r\na\r\n" + part)
    with pytest.raises(FrameError):
        invalidated_keys(b">2\r\n$10\r\ninvalidate\r\n*1\r\n" + part)


def test_words_and_kinds_are_read() -> None:
    frame = message(PATTERN, b"p*", b"channel", b"", 3)
    assert first_word(frame) == b"pmessage" and words_in(frame) == [b"pmessage", b"p*", b"channel", b""]
    assert first_word(b"$3\r\nabc\r\n") == first_word(b"*1\r\n:1\r\n") == b""
    assert in_protocol(frame, 2)[:2] == b"*4" and in_protocol(b"+line\r\n", 3) == b"+line\r\n"


def test_lines_of_monitor_differ_from_other_simple_strings() -> None:
    assert is_monitor_line(b'+1700000000.123456 [0 127.0.0.1:1] "GET" "a"\r\n')
    assert not any(map(is_monitor_line, [b"+OK\r\n", b"+PONG\r\n", b"+17\r\n"]))
