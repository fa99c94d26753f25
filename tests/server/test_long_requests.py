"""A request of many arguments is executed in steps, with the replies of short requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from compat.conformance.wire import request
from resp_server.pipeline.long_requests import UNSPLIT_ARGUMENTS_MAX
from resp_server.protocol.request_parser import CHUNK_ARGUMENTS

pytestmark = pytest.mark.pure

MANY = 3 * CHUNK_ARGUMENTS + 17
KEYS = [b"job:temp:%d" % (at if at % 3 else at + 1_000_000) for at in range(MANY)]
VALUES = [b"%d" % at if at % 3 else None for at in range(MANY)]
TOO_LONG = b"takes 4096 arguments of 2 MiB at once; split the request"


def test_reply_is_that_of_short_request(serve: Callable[..., Any]) -> None:
    peer = serve().connect()
    assert peer.ask("MGET", *KEYS) == VALUES
    assert peer.ask("EXISTS", *KEYS) == peer.ask("TOUCH", *KEYS) == MANY - VALUES.count(None)
    fields = [b"u%d" % at for at in range(MANY)]
    assert peer.ask("HMGET", "job:visits:/", *fields, "nope") == [*(b"%d" % at for at in range(MANY)), None]
    assert peer.ask("HTTL", "job:visits:/", "FIELDS", MANY + 1, *fields, "nope") == [*[-1] * MANY, -2]
    assert b"must match" in peer.ask("HTTL", "job:visits:/", "FIELDS", MANY - 1, *fields)
    assert b"WRONGTYPE" in peer.ask("HMGET", "job:temp:1", *fields)


def test_arguments_of_many_bytes_are_answered_in_steps(serve: Callable[..., Any]) -> None:
    peer = serve().connect()
    assert peer.ask("MGET", *[b"k" * 900_000] * 9, "job:temp:5") == [*[None] * 9, b"5"]
    assert TOO_LONG in peer.ask("SINTER", *[b"k" * 900_000] * 9)


def test_long_request_that_cannot_be_split_is_refused(serve: Callable[..., Any]) -> None:
    peer = serve().connect()
    refused = peer.ask("COMMAND", "GETKEYS", "MGET", *["k"] * UNSPLIT_ARGUMENTS_MAX)
    assert refused == b"ERR 'command getkeys' " + TOO_LONG
    assert peer.ask("COMMAND", "GETKEYS", "MGET", *["k"] * (UNSPLIT_ARGUMENTS_MAX - 3)) == [b"k"] * (
        UNSPLIT_ARGUMENTS_MAX - 3
    )
    assert (
        peer.ask("MSET", *["k"] * (2 * UNSPLIT_ARGUMENTS_MAX))
        == b"READONLY You can't write against a read only replica."
    )


def test_transaction_queues_none_that_is_refused_when_it_is_answered(serve: Callable[..., Any]) -> None:
    peer = serve().connect()
    assert peer.ask("MULTI") == b"OK"
    assert peer.ask("MGET", *KEYS) == b"QUEUED"
    assert peer.ask("EXISTS", *KEYS) == b"QUEUED"
    assert peer.ask("EXEC") == [VALUES, MANY - VALUES.count(None)]
    assert peer.ask("MULTI") == b"OK"
    assert TOO_LONG in peer.ask("MGET", *KEYS, *KEYS)
    assert b"EXECABORT" in peer.ask("EXEC")


def test_key_in_last_step_that_may_not_be_read_refuses_all(serve: Callable[..., Any]) -> None:
    server = serve()
    peer, other = server.connect(), server.connect()
    assert other.ask("ACL", "SETUSER", "u", "on", "nopass", "+@all", "~job:temp:*") == b"OK"
    assert peer.ask("AUTH", "u", "") == b"OK"
    assert peer.ask("MGET", *KEYS) == VALUES
    assert peer.ask("MGET", *KEYS, "job:stats:a") == b"NOPERM No permissions to access a key"
    assert peer.ask("MGET", *KEYS) == VALUES


@pytest.mark.parametrize("is_suppressed", [False, True])
def test_many_subscriptions_are_confirmed_and_get_messages(serve: Callable[..., Any], is_suppressed: bool) -> None:
    server = serve()
    peer, other = server.connect(), server.connect()
    names = [b"c%d" % at for at in range(MANY)]
    if is_suppressed:
        peer.send(request("CLIENT", "REPLY", "OFF"))
    peer.send(request("SUBSCRIBE", *names))
    answers = peer.read_until(b":%d\r\n" % MANY)
    assert answers.count(b"subscribe") == MANY
    assert other.ask("PUBLISH", names[0], "x") == other.ask("PUBLISH", names[-1], "y") == 1
    assert peer.read_until(b"y\r\n").count(b"message") == 2
    peer.send(request("UNSUBSCRIBE"))
    assert peer.read_until(b":0\r\n").count(b"unsubscribe") == MANY
    assert other.ask("PUBLISH", names[0], "x") == 0
    peer.send(request("PSUBSCRIBE", *(b"c%d" % at for at in range(20_000))))
    if not is_suppressed:
        assert b"may be subscribed to 16384 channels" in peer.reply()


def test_client_with_replies_off_can_watch_keys(serve: Callable[..., Any]) -> None:
    server = serve()
    peer = server.connect()
    peer.send(request("CLIENT", "REPLY", "OFF") + request("WATCH", *KEYS) + request("CLIENT", "REPLY", "ON"))
    assert peer.reply() == b"OK"
    assert b" watch=%d " % MANY in peer.ask("CLIENT", "INFO")
    assert b"may watch 16384 keys" in peer.ask("WATCH", *(b"k%d" % at for at in range(17_000)))


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("CLIENT", "SETNAME", "x" * 257), b"a client's name may have 256 bytes; this one has 257"),
        (("CLIENT", "SETINFO", "lib-name", "x" * 257), b"lib-name may have 256 bytes; this one has 257"),
        (("ACL", "SETUSER", "x" * 257), b"a user's name may have 256 bytes; this one has 257"),
        (
            ("ACL", "SETUSER", "u", *["+get"] * 513),
            b"ACL SETUSER takes 512 rules of 64 KiB at once; send several of them",
        ),
        (("SUBSCRIBE", "x" * 1025), b"the name of a channel, or a pattern, may have 1024 bytes; one has 1025"),
        (("PSUBSCRIBE", "x" * 1025), b"the name of a channel, or a pattern, may have 1024 bytes; one has 1025"),
        (("PUBLISH", "x" * 1025, "y"), b"the name of a channel, or a pattern, may have 1024 bytes; one has 1025"),
        (("KEYS", "x" * 1025), b"a pattern may have 1024 bytes; this one has 1025"),
    ],
)
def test_names_of_channels_are_limited(serve: Callable[..., Any], words: Any, what: bytes) -> None:
    told = serve().connect().ask(*words)
    assert told.endswith(what)
