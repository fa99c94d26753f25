"""Whether the upstream and a state say the same about a key."""

from __future__ import annotations

import pytest

from resp_server.command_table.facts import Facts
from resp_server.protocol.replies import Reply, encode
from resp_server.upstream.rules import RulesError, parse_rules
from resp_server.upstream.shadow_compare import Outcome, is_comparable, outcome_of

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


def test_replies_that_depend_on_more_than_the_value_are_not_compared() -> None:
    names = ("get", "hgetall", "ttl", "object|freq", "srandmember")
    assert [is_comparable(name, Facts("", "")) for name in names] == [True, True, False, False, False]
    assert not is_comparable("xread", Facts("", "")) and not is_comparable("bget", Facts("", "", flags=["blocking"]))


def test_a_shadow_says_how_it_compares() -> None:
    row = '[[rule]]\nkeys = "a"\nowner = "{}"\ncompare = {}\n'
    assert parse_rules(row.format("shadow", '"number:1e-9"'), "")[0].tolerance == 1e-9
    assert parse_rules(row.format("shadow", '"exact"'), "")[0].tolerance is None
    with pytest.raises(RulesError, match="'compare' is for owner = \"shadow\""):
        parse_rules(row.format("state", '"exact"'), "")
    for wrong in ("1", '"number"', '"number:-1"', '"number:1e999"', '"json"'):
        with pytest.raises(RulesError, match=r'compare is .*; it must be "exact", or such as "number:1e-9"'):
            parse_rules(row.format("shadow", wrong), "")
