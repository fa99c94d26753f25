"""An analysis names the owners of keys and the open decisions; the first rules leave all keys where they are."""

from __future__ import annotations

from collections.abc import Sequence

from resp_server.backends.routing.key_analysis import (
    SHOWN_CHARACTERS_MAX,
    AnalyzedKeys,
    AnalyzedState,
    KeyAnalysis,
    decisions,
    printable,
)
from resp_server.backends.routing.key_matcher import KeyMatcher
from resp_server.backends.routing.key_patterns_found import FoundKey
from resp_server.backends.routing.rules import Owner, parse_rules
from resp_server.backends.routing.rules_template import first_rules

SPEED = AnalyzedState("job:speed", "job:speed:<car>", "string")
APDEX = AnalyzedState("dash:apdex", "dash/<account>/apdex", "string")
WIDE = AnalyzedState("dash:all", "dash/<any>", "hash")
KEYS = [b"job:speed:1", b"job:speed:2", b"session:1", b"session:2", b"dash/7/title"]


def rows_of(keys: Sequence[bytes], states: Sequence[AnalyzedState], rules: str = "") -> list[AnalyzedKeys]:
    analysis = KeyAnalysis(states, parse_rules(rules, ""))
    for key in keys:
        analysis.add(FoundKey(0, key))
    return list(analysis.rows())


def test_keys_are_counted_by_rule_by_state_and_by_name() -> None:
    rows = rows_of(KEYS, [SPEED, APDEX], '[[rule]]\nname = "mine"\nkeys = "session:1"\nowner = "upstream"\n')
    assert [(row.keys, row.owner, row.count) for row in rows] == [
        ("session:1", Owner.UPSTREAM, 1),
        ("job:speed:<car>", Owner.STATE, 2),
        ("dash/<account>/apdex", Owner.STATE, 0),
        ("dash/7/title", Owner.UPSTREAM, 1),
        ("session:2", Owner.UPSTREAM, 1),
    ]


def test_rule_about_keys_of_one_state_names_it() -> None:
    rule = '[[rule]]\nkeys = "job:<rest>"\nowner = "state"\n'
    (row, *_) = rows_of(KEYS, [SPEED, APDEX], rule)
    assert row.state == SPEED and row.rule is not None and row.count == 2


def test_copies_of_state_are_to_be_decided_and_other_keys_are_not() -> None:
    assert decisions(rows_of(KEYS, [SPEED])) == [
        "2 keys job:speed:<car>: from the upstream, as today, or from job:speed"
    ]
    assert decisions(rows_of([b"x"], [SPEED])) == []


def test_analysis_reports_other_types_and_missing_keys() -> None:
    rows = rows_of(KEYS, [SPEED])
    rows[0].types.update(["hash", "string"])
    rows[0].compared, rows[0].absent = 2, 1
    other, absent = decisions(rows)
    assert "1 of 2 looked at has another type, hash, and job:speed is a string" in other
    assert "job:speed does not have 1 of 2" in absent and "prefer-state" in absent
    assert first_rules(rows).count("# Look first:") == 2


def test_analysis_reports_two_states_with_same_keys() -> None:
    rows = rows_of([b"dash/7/apdex"], [WIDE, APDEX])
    assert sum(row.count for row in rows) == 1
    assert any("dash:apdex and dash:all may have the same keys" in each for each in decisions(rows))


def test_first_rules_are_valid_and_change_nothing() -> None:
    keys = [b"dash/7/apdex", b"dash/7/title", *KEYS]
    states = [WIDE, APDEX, SPEED, AnalyzedState("quoted:state", 'a"\\\x7f:<x>', "string")]
    rows = rows_of([*keys, b'a"\\\x7f:1'], states)
    rules = parse_rules(first_rules(rows), "first")
    assert {rule.owner for rule in rules} == {Owner.UPSTREAM}
    matcher = KeyMatcher((), rules)
    assert all(matcher.decide(key).owner is Owner.UPSTREAM for key in keys)
    assert {rule.keys.text for rule in rules} == {row.keys for row in rows if row.state is not None and row.count}


def test_narrow_rule_precedes_wide_one_and_equal_rules_are_joined() -> None:
    wide, narrow = (
        AnalyzedKeys("a:<x>", Owner.STATE, WIDE, count=1),
        AnalyzedKeys("a:<x>:b", Owner.STATE, APDEX, count=1),
    )
    same = AnalyzedKeys("a:<y>", Owner.STATE, SPEED, count=1)
    assert [rule.keys.text for rule in parse_rules(first_rules([wide, narrow, same]), "")] == ["a:<x>:b", "a:<x>"]


def test_format_that_no_rule_can_have_is_comment() -> None:
    text = first_rules([AnalyzedKeys("a*:<x>", Owner.STATE, SPEED, count=1)])
    assert parse_rules(text, "") == [] and "a*:<x>" in text


def test_keys_are_shown_in_one_line_without_control_characters() -> None:
    assert printable(b"a\x1b[2J\nb\xff\xc3\xa9") == "a\\x1b[2J\\nb\\xffé"
    assert len(printable(b"x" * 1000)) == SHOWN_CHARACTERS_MAX + 3
