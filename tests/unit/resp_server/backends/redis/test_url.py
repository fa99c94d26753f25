"""URLs of upstreams."""

from __future__ import annotations

import pytest

from resp_server.backends.redis.url import UpstreamAddress, UpstreamUrl


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("redis://cache", UpstreamUrl("cache")),
        ("redis://cache:6380/2", UpstreamUrl("cache", 6380, database=2)),
        ("redis://[::1]:6380/", UpstreamUrl("::1", 6380)),
        ("redis://:secret@cache", UpstreamUrl("cache", password="secret")),
        ("redis://app:p%40ss%3A@cache?db=7", UpstreamUrl("cache", user="app", password="p@ss:", database=7)),
        ("rediss://cache:6380/2", UpstreamUrl("cache", 6380, database=2, is_tls=True)),
        (
            "redis+cluster://app:x@A:1,[::1]:2,c",
            UpstreamUrl(
                user="app",
                password="x",
                seeds=(UpstreamAddress("a", 1), UpstreamAddress("::1", 2), UpstreamAddress("c", 6379)),
            ),
        ),
        (
            "redis+sentinel://:x@a,b:5/main/2?sentinel_password=y",
            UpstreamUrl(
                password="x",
                database=2,
                seeds=(UpstreamAddress("a", 26379), UpstreamAddress("b", 5)),
                master="main",
                sentinel_password="y",
            ),
        ),
        ("rediss+cluster://a", UpstreamUrl(is_tls=True, seeds=(UpstreamAddress("a", 6379),))),
        ("unix:///run/redis.sock", UpstreamUrl(path="/run/redis.sock")),
        (
            "unix://app:x@/run/redis.sock?db=1",
            UpstreamUrl(path="/run/redis.sock", user="app", password="x", database=1),
        ),
    ],
)
def test_url_names_server_user_and_database(text: str, expected: UpstreamUrl) -> None:
    assert UpstreamUrl.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("cache:6379", "begins with redis://, rediss://"),
        ("redis+cluster://:secret@cache/1", "a Redis Cluster has database 0 only"),
        ("redis+cluster://:secret@a,,b", "has no host"),
        ("redis://:secret@a,b", "redis:// has one host"),
        ("redis+sentinel://:secret@a,b", "has the name of their master"),
        ("redis+sentinel://:secret@a,b/m?password=x", "no options but db, sentinel_password, sentinel_user"),
        ("redis://:secret@", "has no host"),
        ("redis://:secret@::1:8330", "an IPv6 address in the upstream's URL is in brackets"),
        ("redis+cluster://a:1,::1:8330", "an IPv6 address in the upstream's URL is in brackets"),
        ("redis://:secret@h:99999", "no number from 1 to 65535"),
        ("redis://h/secret", "database of the upstream's URL is no number"),
        ("redis://:x/secret@h:1", "a password's / is written as %2F"),
        ("redis://:secret@h/1?tls=1", "no options but db"),
        ("redis://app@h", "a user without a password"),
        ("unix://:secret@host/path", "unix:///path/of/the.sock"),
        ("unix://", "unix:///path/of/the.sock"),
    ],
)
def test_wrong_url_is_refused_without_repeating_password(text: str, reason: str) -> None:
    with pytest.raises(ValueError) as raised:
        UpstreamUrl.parse(text)
    assert reason in str(raised.value) and "secret" not in str(raised.value)


def test_password_is_in_no_text_of_url() -> None:
    url = UpstreamUrl.parse("redis://app:secret@cache:6380/2")
    assert "secret" not in repr(url) and url.address == "cache:6380"


def test_connection_begins_with_log_in_protocol_and_database() -> None:
    last = [(b"CLIENT", b"SETNAME", b"sparkis-proxy"), (b"ROLE",), (b"PING",)]
    assert UpstreamUrl.parse("redis://h").greeting(2) == last
    greeting = UpstreamUrl.parse("redis://app:x@h/3").greeting(3)
    assert greeting == [(b"AUTH", b"app", b"x"), (b"HELLO", b"3"), (b"SELECT", b"3"), *last]
    assert UpstreamUrl.parse("redis://:x@h").greeting(2)[0] == (b"AUTH", b"x")


def test_ipv6_address_is_shown_as_it_is_written() -> None:
    assert UpstreamUrl.parse("redis://:x@[::1]:6380").address == "[::1]:6380"
    assert UpstreamUrl.parse("redis+cluster://a,[::1]:2").address == "a:6379,[::1]:2"
