"""The judge finds what differs, and lets pass only what Redis leaves open or `deviations.toml` explains."""

from __future__ import annotations

import pytest

from compat.conformance.judge import Deviations, Judge, ReplyDeviation, mismatches
from compat.conformance.wire import Reply, replies_in


def reply(data: bytes) -> Reply:
    (found,) = replies_in(data)
    return found


def judge(*reply_deviations: ReplyDeviation, config_values: dict[str, str] | None = None) -> Judge:
    deviations = Deviations(reply_deviations, (), {}, {}, {}, {}, config_values or {}, {}, {})
    return Judge(deviations, {b"timeout", b"port"}, {b"get"}, {b"a", b"b"})


SAME: list[tuple[bytes, bytes, bytes]] = [
    (b"GET a", b"$1\r\nx\r\n", b"$1\r\nx\r\n"),
    (b"KEYS *", b"*2\r\n+a\r\n+b\r\n", b"*2\r\n+b\r\n+a\r\n"),
    (b"HGETALL a", b"%2\r\n+a\r\n:1\r\n+b\r\n:2\r\n", b"%2\r\n+b\r\n:2\r\n+a\r\n:1\r\n"),
    (b"hgetall a", b"*4\r\n+a\r\n:1\r\n+b\r\n:2\r\n", b"*4\r\n+b\r\n:2\r\n+a\r\n:1\r\n"),
    (b"TTL a", b":10\r\n", b":11\r\n"),
    (b"RANDOMKEY", b"$1\r\na\r\n", b"$1\r\nb\r\n"),
    (b"SCAN 0", b"*2\r\n$1\r\n7\r\n*0\r\n", b"*2\r\n$2\r\n12\r\n*1\r\n+a\r\n"),
    (b"SCAN 0", b"*2\r\n$1\r\n0\r\n*2\r\n+a\r\n+b\r\n", b"*2\r\n$1\r\n0\r\n*2\r\n+b\r\n+a\r\n"),
    (b"CLIENT ID", b":5\r\n", b":12\r\n"),
    (b"TIME", b"*2\r\n$2\r\n10\r\n$1\r\n5\r\n", b"*2\r\n$2\r\n11\r\n$6\r\n999999\r\n"),
    (b"CONFIG GET *", b"*4\r\n+timeout\r\n+0\r\n+other\r\n+1\r\n", b"*2\r\n+timeout\r\n+0\r\n"),
]

DIFFERENT: list[tuple[bytes, bytes, bytes]] = [
    (b"GET a", b"$1\r\nx\r\n", b"$1\r\ny\r\n"),
    (b"GET a", b"$-1\r\n", b"_\r\n"),
    (b"GET a", b"-ERR a\r\n", b"-ERR b\r\n"),
    (b"KEYS *", b"*1\r\n+a\r\n", b"*2\r\n+a\r\n+a\r\n"),
    (b"KEYS *", b"*1\r\n+a\r\n", b"~1\r\n+a\r\n"),
    (b"HGETALL a", b"*4\r\n+a\r\n:1\r\n+b\r\n:2\r\n", b"*4\r\n+a\r\n:2\r\n+b\r\n:1\r\n"),
    (b"TTL a", b":-1\r\n", b":-2\r\n"),
    (b"TTL a", b":10\r\n", b":12\r\n"),
    (b"RANDOMKEY", b"$1\r\na\r\n", b"$1\r\nz\r\n"),
    (b"SCAN 0", b"*2\r\n$1\r\n0\r\n*1\r\n+a\r\n", b"*2\r\n$1\r\n0\r\n*0\r\n"),
    (b"SCAN 0", b"*2\r\n$1\r\n0\r\n*0\r\n", b"*2\r\n:0\r\n*0\r\n"),
    (b"HSCAN a 0", b"*2\r\n$1\r\n0\r\n*2\r\n+a\r\n+1\r\n", b"*2\r\n$1\r\n0\r\n*2\r\n+1\r\n+a\r\n"),
    (b"CONFIG GET *", b"*4\r\n+timeout\r\n+0\r\n+port\r\n+1\r\n", b"*2\r\n+timeout\r\n+0\r\n"),
    (b"CONFIG GET *", b"*2\r\n+timeout\r\n+0\r\n", b"*2\r\n+timeout\r\n+1\r\n"),
]


@pytest.mark.parametrize(("line", "theirs", "ours"), SAME)
def test_undefined_order_of_redis_is_no_difference(line: bytes, theirs: bytes, ours: bytes) -> None:
    assert judge().is_same(line.split(), reply(theirs), reply(ours))


@pytest.mark.parametrize(("line", "theirs", "ours"), DIFFERENT)
def test_other_differences_are_wrong(line: bytes, theirs: bytes, ours: bytes) -> None:
    assert not judge().is_same(line.split(), reply(theirs), reply(ours))


def test_deviation_explains_answers_of_its_command_alone() -> None:
    one = judge(ReplyDeviation("get", ["GET"], "-ERR .*", r"\$-1", "a reason"))
    assert one.is_same([b"GET", b"a"], reply(b"-ERR no\r\n"), reply(b"$-1\r\n"))
    assert not one.is_same([b"GET", b"a"], reply(b"$-1\r\n"), reply(b"-ERR no\r\n"))
    assert not one.is_same([b"HGET", b"a"], reply(b"-ERR no\r\n"), reply(b"$-1\r\n"))


def test_missing_answer_is_difference() -> None:
    replies = replies_in(b"+a\r\n+b\r\n")
    assert judge().differences([[b"PING"], [b"PING"]], replies, replies) == []
    assert len(judge().differences([[b"PING"], [b"PING"]], replies, replies[:1])) == 1


def test_setting_may_differ_if_deviations_list_it() -> None:
    theirs, ours = reply(b"*2\r\n+port\r\n+1\r\n"), reply(b"*2\r\n+port\r\n+2\r\n")
    assert not judge().is_same([b"CONFIG", b"GET", b"port"], theirs, ours)
    assert judge(config_values={"port": "its own"}).is_same([b"CONFIG", b"GET", b"port"], theirs, ours)


def test_names_without_line_and_lines_without_name_are_found() -> None:
    assert mismatches({"a*": "", "b": ""}, ["ab", "b"]) == []
    assert mismatches({"a*": ""}, ["b"]) == ["b: explained by no line", "the line 'a*' is not needed"]
    assert mismatches({"a*": "", "*b": ""}, ["ab"]) == ["ab: explained by ['a*', '*b']"]


def test_every_deviation_has_reason() -> None:
    deviations = Deviations.load()
    tables = [table for table in vars(deviations).values() if isinstance(table, dict)]
    reasons = [each.reason for each in (*deviations.reply_deviations, *deviations.bytes_deviations)]
    assert all(reasons) and all(reason for table in tables for reason in table.values())
