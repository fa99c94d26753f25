"""Comparisons of the replies of the upstream and of a state."""

from __future__ import annotations

import pytest

from resp_server.backends.routing.rules import RulesError, parse_rules
from resp_server.backends.routing.shadow_compare import (
    SHOWN_CHARS_MAX,
    Outcome,
    is_comparable,
    outcome_of,
    shown_replies,
    shown_request,
)
from resp_server.command.spec import CommandSpec
from resp_server.protocol.replies import Reply, encode

EQUAL, DIFFERENT = Outcome.EQUAL, Outcome.DIFFERENT


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize(
    ("name", "upstream", "state", "tolerance", "expected"),
    [
        ("get", b"a", b"a", None, EQUAL),
        ("get", b"a", b"b", None, DIFFERENT),
        ("get", b"0.90", b"0.9", None, DIFFERENT),
        ("get", b"0.90", b"0.9", 1e-9, EQUAL),
        ("get", b"1000000000", b"1000000000.1", 1e-9, EQUAL),
        ("get", b"1", b"1.1", 1e-9, DIFFERENT),
        ("get", b"a", b"1", 1e-9, DIFFERENT),
        ("get", b"1_000", b"1000", 1e-9, DIFFERENT),
        ("get", b"1 ", b"1", 1e-9, DIFFERENT),
        ("get", None, b"1", None, Outcome.MISSING_IN_UPSTREAM),
        ("get", b"1", None, None, Outcome.MISSING_IN_STATE),
        ("get", None, None, None, EQUAL),
        ("exists", 0, 1, None, Outcome.MISSING_IN_UPSTREAM),
        ("hgetall", {b"a": b"1", b"b": b"2.0"}, {b"b": b"2", b"a": b"1"}, 1e-9, EQUAL),
        ("hgetall", {b"a": b"1", b"b": b"2.0"}, {b"b": b"2", b"a": b"1"}, None, DIFFERENT),
        ("hgetall", {b"a": b"1"}, {b"a": b"1", b"b": b"2"}, 1e-9, DIFFERENT),
        ("hgetall", {b"a": b"1"}, {}, None, Outcome.MISSING_IN_STATE),
        ("smembers", [b"a", b"b"], [b"b", b"a"], None, EQUAL),
        ("lrange", [b"a", b"b"], [b"b", b"a"], None, DIFFERENT),
        ("lrange", [b"1", b"2.0"], [b"1.0", b"2"], 0.0, EQUAL),
    ],
)
def test_values_are_compared(
    protocol: int, name: str, upstream: Reply, state: Reply, tolerance: float | None, expected: Outcome
) -> None:
    assert outcome_of(name, encode(upstream, protocol), encode(state, protocol), tolerance) is expected


def test_replies_that_depend_on_more_than_value_are_not_compared() -> None:
    names = ("get", "hgetall", "ttl", "object|freq", "srandmember")
    assert [is_comparable(name, CommandSpec("", "")) for name in names] == [True, True, False, False, False]
    assert not is_comparable("xread", CommandSpec("", "")) and not is_comparable(
        "bget", CommandSpec("", "", flags=["blocking"])
    )


def test_shadow_rule_has_comparison() -> None:
    row = '[[rule]]\nkeys = "a"\nowner = "{}"\ncompare = {}\n'
    assert parse_rules(row.format("shadow", '"number:1e-9"'), "")[0].tolerance == 1e-9
    assert parse_rules(row.format("shadow", '"exact"'), "")[0].tolerance is None
    with pytest.raises(RulesError, match="'compare' is for owner = \"shadow\""):
        parse_rules(row.format("state", '"exact"'), "")
    for wrong in ("1", '"number"', '"number:-1"', '"number:1e999"', '"json"'):
        with pytest.raises(RulesError, match=r'compare is .*; it must be "exact", or such as "number:1e-9"'):
            parse_rules(row.format("shadow", wrong), "")


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize(
    ("name", "upstream", "state", "expected"),
    [
        ("get", b"an old copy", b"30", ('"an old copy"', '"30"')),
        ("get", None, b"", ("(nil)", '""')),
        ("get", 'gr\u00fc\u00df "x"'.encode(), b"\xff\n", ('"gr\u00fc\u00df \\"x\\""', r'"\xff\x0a"')),
        ("get", b"\\xff", b"\xff", (r'"\\xff"', r'"\xff"')),
        ("hlen", 3, 4, ("3", "4")),
        ("hmget", [b"1", None], [b"1", b"2"], ("from element 1 on: [(nil)]", 'from element 1 on: ["2"]')),
        ("lrange", [b"1"], [b"1", b"2"], ("from element 1 on: []", 'from element 1 on: ["2"]')),
        ("smembers", [b"a", b"b"], [b"c", b"b"], ('["a"]', '["c"]')),
    ],
)
def test_difference_is_shown(
    protocol: int, name: str, upstream: Reply, state: Reply, expected: tuple[str, str]
) -> None:
    assert shown_replies(name, encode(upstream, protocol), encode(state, protocol)) == expected


@pytest.mark.parametrize("protocol", [2, 3])
def test_only_fields_that_differ_are_shown_of_hash(protocol: int) -> None:
    same = {b"f%d" % number: b"%d.0" % number for number in range(500)}
    upstream: Reply = {**same, b"kmh": b"29", b"old": b"1"}
    state: Reply = {**{name: value[:-2] for name, value in same.items()}, b"kmh": b"30", b"new": b"2"}
    texts = shown_replies("hgetall", encode(upstream, protocol), encode(state, protocol), 1e-9)
    assert texts == ('{"kmh": "29", "old": "1"}', '{"kmh": "30", "new": "2"}')


def test_shown_difference_is_short_and_error_is_its_text() -> None:
    error = b"-WRONGTYPE Operation against a key\r\n"
    long, shown = shown_replies("get", encode(b"x" * 10_000, 2), error)
    assert len(long) == SHOWN_CHARS_MAX and long.startswith('"xxx') and long.endswith("...")
    assert shown == "WRONGTYPE Operation against a key"


def test_read_is_shown_as_it_is_typed() -> None:
    assert shown_request([b"HGET", b"job:city:{7}", b"the name"]) == 'HGET job:city:{7} "the name"'
    assert shown_request([b"GET", b"", b"\xff", b'a"b']) == r'GET "" "\xff" "a\"b"'
    assert len(shown_request([b"MGET", *[b"key"] * 10_000])) == SHOWN_CHARS_MAX
