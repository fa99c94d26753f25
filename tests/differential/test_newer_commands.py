"""Commands and options that are newer than the real server: their replies are those of 7.4, which are written here.

All were compared with a redis-server 7.4.1. Other sources: the pages of CLIENT SETINFO, CLIENT NO-TOUCH, HSCAN and HTTL
in Redis' documentation, and the tests of Redis itself (`unit/introspection.tcl`, `unit/type/hash-field-expire.tcl`).
"""

from __future__ import annotations

import pytest

from compat.conformance.pair import Pair
from compat.conformance.wire import request
from resp_server.commands import command_table

ANSWERS: list[tuple[list[bytes], bytes]] = [
    ([b"CLIENT", b"SETINFO", b"lib-name", b"redis-py"], b"+OK"),
    ([b"CLIENT", b"SETINFO", b"LIB-VER", b"8.1.0"], b"+OK"),
    ([b"client", b"setinfo", b"lib-ver", b""], b"+OK"),
    (
        [b"CLIENT", b"SETINFO", b"lib-name", b"redis py"],
        b"-ERR lib-name cannot contain spaces, newlines or special characters.",
    ),
    ([b"CLIENT", b"SETINFO", b"badger", b"hamster"], b"-ERR Unrecognized option 'badger'"),
    ([b"CLIENT", b"SETINFO", b"lib-name"], b"-ERR wrong number of arguments for 'client|setinfo' command"),
    ([b"CLIENT", b"NO-TOUCH", b"on"], b"+OK"),
    ([b"CLIENT", b"NO-TOUCH", b"OFF"], b"+OK"),
    ([b"CLIENT", b"NO-TOUCH", b"maybe"], b"-ERR syntax error"),
    ([b"CLIENT", b"NO-TOUCH"], b"-ERR wrong number of arguments for 'client|no-touch' command"),
    ([b"CLIENT", b"KILL", b"MAXAGE", b"0"], b"-ERR maxage should be greater than 0"),
    ([b"client", b"kill", b"type", b"pubsub", b"maxage", b"x"], b"-ERR maxage is not an integer or out of range"),
    ([b"CLIENT", b"KILL", b"MaxAge", b"1000000"], b":0"),
    ([b"CLIENT", b"KILL", b"MAXAGE"], b"-ERR No such client"),
    ([b"CLIENT", b"KILL", b"SKIPME", b"NO", b"MAXAGE"], b"-ERR syntax error"),
    ([b"HSCAN", b"hash:one", b"0", b"NOVALUES"], b"*2\r\n$1\r\n0\r\n*1\r\n$5\r\nfield"),
    ([b"HSCAN", b"hash:one", b"0", b"novalues", b"MATCH", b"x*"], b"*2\r\n$1\r\n0\r\n*0"),
    ([b"HSCAN", b"missing", b"0", b"NOVALUES"], b"*2\r\n$1\r\n0\r\n*0"),
    ([b"SSCAN", b"missing", b"0", b"NOVALUES"], b"*2\r\n$1\r\n0\r\n*0"),
    ([b"HTTL", b"hash:one", b"FIELDS", b"2", b"field", b"nope"], b"*2\r\n:-1\r\n:-2"),
    ([b"HPTTL", b"hash:one", b"FIELDS", b"1", b"field"], b"*1\r\n:-1"),
    ([b"HEXPIRETIME", b"hash:large", b"fields", b"1", b"nope"], b"*1\r\n:-2"),
    ([b"HPEXPIRETIME", b"hash:later", b"FIELDS", b"1", b"f"], b"*1\r\n:-1"),
    ([b"HTTL", b"plain", b"FIELDS", b"1", b"f"], b"-WRONGTYPE Operation against a key holding the wrong kind of value"),
    ([b"HTTL", b"hash:one", b"FIELDS", b"1"], b"-ERR wrong number of arguments for 'httl' command"),
    (
        [b"HTTL", b"hash:one", b"FIELDS", b"2", b"field"],
        b"-ERR The `numfields` parameter must match the number of arguments",
    ),
    ([b"HTTL", b"hash:one", b"FIELDS", b"01", b"field"], b"-ERR Number of fields must be a positive integer"),
    ([b"HPTTL", b"hash:one", b"FIELDS", b"0", b"field"], b"-ERR Number of fields must be a positive integer"),
    (
        [b"HTTL", b"hash:one", b"FIELDS", b"9223372036854775808", b"f"],
        b"-ERR Number of fields must be a positive integer",
    ),
    *[
        ([*words, cursor], b"-ERR invalid cursor")
        for words in ([b"SCAN"], [b"HSCAN", b"hash:one"], [b"SSCAN", b"plain"], [b"ZSCAN", b"missing"])
        for cursor in (b"", b"-1", b"-9223372036854775808", b"\x000", b"0 ", b" ", b"-", b"18446744073709551616")
    ],
    *[
        ([b"HSCAN", b"hash:one", cursor], b"*2\r\n$1\r\n0\r\n*2\r\n$5\r\nfield\r\n$5\r\nvalue")
        for cursor in (b" 0", b"\t\n-0", b"+0", b"00", b"0\x00x")
    ],
    ([b"SSCAN", b"set:one", b" 0"], b"*2\r\n$1\r\n0\r\n*1\r\n$4\r\nonly"),
    ([b"ZSCAN", b"zset:one", b" 0"], b"*2\r\n$1\r\n0\r\n*2\r\n$4\r\nonly\r\n$1\r\n1"),
    ([b"SCAN", b"-01"], b"*2\r\n$1\r\n0\r\n*0"),
    *[
        ([b"COMMAND", name, *words], b"-ERR The command has no key arguments")
        for name in (b"GETKEYS", b"GETKEYSANDFLAGS")
        for words in (
            [b"SPUBLISH", b"a", b"b"],
            [b"SSUBSCRIBE", b"a", b"b"],
            [b"SUNSUBSCRIBE"],
            [b"PUBLISH", b"a", b"b"],
        )
    ],
    (
        [b"HEXPIRE", b"hash:one", b"10", b"FIELDS", b"1", b"field"],
        b"-READONLY You can't write against a read only replica.",
    ),
]


@pytest.mark.parametrize(("words", "answer"), ANSWERS, ids=lambda part: repr(part) if isinstance(part, bytes) else None)
def test_newer_command_is_answered_as_7_4_does(pair: Pair, words: list[bytes], answer: bytes) -> None:
    for greeting in ([], [[b"HELLO", b"3"]]):
        assert pair.replies_to([*greeting, words])[1][-1].raw == answer + b"\r\n"


def test_list_of_commands_names_subcommands(pair: Pair) -> None:
    listed = [reply.value for reply in pair.replies_to([[b"COMMAND", b"LIST"]])[1][0].value]
    everything = [each for one in command_table() for each in (one, *one.subcommands.values())]
    assert listed == [each.name.encode() for each in everything]
    assert {b"get", b"acl", b"acl|cat", b"client|no-touch"} < set(listed)


def test_client_setinfo_is_shown_in_client_list(pair: Pair) -> None:
    with pair.sparkis.connect() as connection:
        for line in ("CLIENT SETINFO lib-name a-library", "CLIENT SETINFO lib-ver 1.2.3", "CLIENT NO-TOUCH on"):
            connection.send(request(*line.split()))
            assert connection.read().value == b"OK"
        text = connection.call("CLIENT", "INFO").value
    assert b"lib-name=a-library lib-ver=1.2.3" in text
    assert b"flags=T " in text
