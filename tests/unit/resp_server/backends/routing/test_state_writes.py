"""Writes with states' keys whose rule does not refuse them."""

from __future__ import annotations

import pytest

from resp_server.backends.routing.ownership import Ownership
from resp_server.backends.routing.route import DroppedRoute, Route, SplitRoute, StatesRoute, UpstreamRoute
from resp_server.backends.routing.router import Router
from resp_server.backends.routing.rules import RulesError, parse_rules
from resp_server.commands import command_table
from resp_server.protocol.errors import GenericError

RULES = """
[[rule]]
name = "copied"
keys = "drop:<x>"
owner = "state"
writes = "drop"
[[rule]]
keys = "pass:<x>"
owner = "state"
writes = "pass"
[[rule]]
keys = "keep:<x>"
owner = "state"
"""


def route(line: str) -> Route:
    ownership = Ownership()
    ownership.complete()
    ownership.take_rules(parse_rules(RULES, "rules"))
    made = Router(command_table(), ownership).route([word.encode() for word in line.split(" ")])
    assert made is not None
    return made


@pytest.mark.parametrize(
    "line",
    [
        *("SET drop:1 x", "set drop:1 x EX 10", "SET drop:1 x KEEPTTL", "SET drop:1 x pxat 1900000000000"),
        *("SETEX drop:1 5 x", "PSETEX drop:1 5 x", "MSET drop:1 x", "MSET drop:1 x drop:2 y drop:1 z"),
    ],
)
def test_plain_set_is_dropped_by_rule(line: str) -> None:
    assert type(route(line)) is DroppedRoute


@pytest.mark.parametrize(
    "line",
    [
        *("SET drop:1 x NX", "SET drop:1 x GET", "SET drop:1 x EX", "SET drop:1 x EX 0", "SET drop:1 x EX x"),
        *("SET drop:1 x EX 5 KEEPTTL", "SETEX drop:1 0 x", "DEL drop:1", "INCR drop:1", "GETSET drop:1 x"),
        *("MSETNX drop:1 x", "EVAL x 1 drop:1", "BLPOP drop:1 0", "RENAME a drop:1", "SETNX drop:1 x"),
    ],
)
def test_other_write_is_refused_by_rule_that_drops_plain_set(line: str) -> None:
    with pytest.raises(GenericError) as caught:
        route(line)
    assert str(caught.value) == (
        "key 'drop:1' is the states', by the rule 'copied'; "
        "the rule 'copied' drops plain SET, SETEX, PSETEX and MSET only"
    )


def test_mset_is_sent_upstream_without_dropped_keys() -> None:
    made = route("MSET a 1 drop:1 2 b 3 drop:2 4 pass:1 5")
    assert type(made) is UpstreamRoute and made.request == [
        b"MSET",
        b"a",
        b"1",
        b"b",
        b"3",
        b"pass:1",
        b"5",
    ]


@pytest.mark.parametrize("line", ["MSET a 1 drop:1 2 keep:1 3", "DEL a pass:1 keep:1", "MSET keep:1 1 drop:1 2"])
def test_one_refused_key_refuses_request(line: str) -> None:
    with pytest.raises(GenericError, match=r"^key 'keep:1' is the states', by the rule 'keep:<x>'$"):
        route(line)


@pytest.mark.parametrize(
    "line", ["SET pass:1 x", "DEL a pass:1", "INCR pass:1", "EVAL x 1 pass:1", "RENAME pass:1 a", "SORT pass:1"]
)
def test_rule_passes_writes_to_upstream(line: str) -> None:
    made = route(line)
    assert type(made) is UpstreamRoute and made.request is None


def test_reads_are_states_for_all_rules_about_writes() -> None:
    assert {type(route(f"GET {kind}:1")) for kind in ("drop", "pass", "keep")} == {StatesRoute}
    assert type(route("MGET a drop:1 pass:1")) is SplitRoute


def test_number_of_words_is_checked_before_write_is_dropped() -> None:
    for line in ("SET drop:1", "MSET drop:1 x drop:2"):
        with pytest.raises(GenericError):
            route(line)


def test_writes_are_setting_of_states_keys() -> None:
    with pytest.raises(RulesError, match="'writes' is for owner = \"state\""):
        parse_rules('[[rule]]\nkeys = "a"\nowner = "upstream"\nwrites = "drop"\n', "rules")
