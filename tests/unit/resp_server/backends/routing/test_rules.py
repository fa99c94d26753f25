"""The rules file: taken whole, or not at all with all of its mistakes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from resp_server.backends.routing.key_matcher import KeyMatcher, KeyOwner, OwnedFormat
from resp_server.backends.routing.rule_overlaps import overlaps
from resp_server.backends.routing.rules import Owner, RulesError, parse_rules
from resp_server.backends.routing.rules_file import FILE_BYTES_MAX, RulesFile


def mistakes_of(text: str) -> list[str]:
    with pytest.raises(RulesError) as caught:
        parse_rules(text, "routes.toml")
    return list(caught.value.mistakes)


def test_rules_are_read_in_order_of_file() -> None:
    rules = parse_rules(
        """
        [[rule]]
        name = "dashboards"
        keys = "dash/<account>/apdex"
        owner = "state"

        [[rule]]
        keys = "dash/<any>"
        owner = "upstream"
        """,
        "routes.toml",
    )
    assert [(rule.name, rule.keys.text, rule.owner) for rule in rules] == [
        ("dashboards", "dash/<account>/apdex", Owner.STATE),
        ("dash/<any>", "dash/<any>", Owner.UPSTREAM),
    ]
    assert parse_rules("", "routes.toml") == []


def test_first_matching_rule_decides_before_key_formats() -> None:
    text = '[[rule]]\nkeys = "a:<x>:z"\nowner = "upstream"\n[[rule]]\nkeys = "a:<x>"\nowner = "state"\n'
    made = KeyMatcher([OwnedFormat("a:b:<c>", "job:b"), OwnedFormat("c:<d>", "job:c")], parse_rules(text, ""))
    keys = (b"a:b:z", b"a:b:c", b"a:q", b"c:1", b"d")
    assert [made.owner_of(key) for key in keys] == [None, "job:b", "", "job:c", None]
    assert (
        made.owner_text(b"a:q") == "the states', by the rule 'a:<x>'"
        and made.owner_text(b"a:b:c") == "owned by state job:b"
    )
    assert made.owner_text(b"a:b:z") == made.owner_text(b"d") == "the upstream's"


def test_all_mistakes_are_reported_with_number_name_and_line() -> None:
    found = mistakes_of(
        """
        title = "mine"
        [[rule]]
        keys = "session:*"
        owner = "mine"
        [[rule]]
        name = "two"
        keys = "<a><b>"
        owner = "state"
        colour = 1
        # a comment with [[rule]] in it
        [[rule]]
        name = ""
        [[rule]]
        keys = 7
        owner = 7
        """
    )
    owners = '"state", "upstream", "prefer-state", "shadow"'
    assert found == [
        "unknown table or setting 'title': rules are [[rule]] tables",
        "rule 1 'session:*' (line 3): keys 'session:*' has a '*': write a placeholder, such as 'session:<any>'",
        f"rule 1 'session:*' (line 3): owner is 'mine'; it must be one of {owners}",
        "rule 2 'two' (line 6): the key format '<a><b>' has nothing between two columns, so that different rows could \
make one key; put a separator between them",
        "rule 2 'two' (line 6): unknown setting 'colour'",
        "rule 3 '' (line 12): it has no 'keys'",
        'rule 3 \'\' (line 12): it has no \'owner\': one of "state", "upstream", "prefer-state", "shadow"',
        "rule 3 '' (line 12): name is ''; it must be a text that is not empty",
        "rule 4 (line 14): keys is 7; it must be a text that is not empty",
        'rule 4 (line 14): owner is 7; it must be one of "state", "upstream", "prefer-state", "shadow"',
    ]


def test_rules_in_one_line_have_no_line() -> None:
    (found,) = mistakes_of('rule = [{keys = "a", owner = "b"}]')
    assert found.startswith("rule 1 'a': owner is 'b'")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *(("session:<id>", "session:<id>"), ("session:<id>", "session:<user>")),
        *(("session:<id>", "session:<id>:tmp"), ("<any>", "a"), ("a", "a"), ("a<x>b<y>c", "a1b<z>bc")),
    ],
)
def test_rule_that_could_never_apply_conflicts_with_one_before(first: str, second: str) -> None:
    text = f'[[rule]]\nname = "one"\nkeys = "{first}"\nowner = "state"\n'
    text += f'[[rule]]\nname = "two"\nkeys = "{second}"\nowner = "upstream"\n'
    (found,) = mistakes_of(text)
    assert found == (
        "rule 2 'two' (line 5): it conflicts with rule 1 'one' (line 1), which covers all of its keys and comes first, "
        "so that it would never apply; remove one of them, or put the narrower one first"
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [("session:<id>:tmp", "session:<id>"), ("a:<x>", "<y>:b"), ("a", "b"), ("a<x>b", "a<x>"), ("aa", "a<x>a<y>a")],
)
def test_rule_that_applies_to_some_key_is_no_conflict(first: str, second: str) -> None:
    text = f'[[rule]]\nkeys = "{first}"\nowner = "state"\n[[rule]]\nkeys = "{second}"\nowner = "upstream"\n'
    assert len(parse_rules(text, "routes.toml")) == 2


def test_two_rules_of_one_name_are_mistake() -> None:
    text = '[[rule]]\nname = "n"\nkeys = "a"\nowner = "state"\n[[rule]]\nname = "n"\nkeys = "b"\nowner = "state"\n'
    assert mistakes_of(text) == ["rule 2 'n' (line 5): it has the name of rule 1 'n' (line 1)"]


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("[[rule]\n", "it is not TOML: "),
        ("rule = 7", "'rule' is not a list of tables: write [[rule]]"),
        ('[rule]\nkeys = "a"', "'rule' is not a list of tables: write [[rule]]"),
        ('[[rule]]\nkeys = "a"\nowner = "state"\n' * 1001, "it has 1001 rules; at most 1000 are possible"),
    ],
)
def test_file_without_list_of_rules_is_refused(text: str, mistake: str) -> None:
    (found,) = mistakes_of(text)
    assert found.startswith(mistake)


def test_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "routes.toml"
    with pytest.raises(RulesError, match=r"routes\.toml has 1 mistake: it cannot be read: No such file or directory"):
        RulesFile(path).read()
    path.write_bytes(b"# \xff")
    with pytest.raises(RulesError, match="it is not UTF-8: invalid start byte at byte 2"):
        RulesFile(path).read()
    path.write_bytes(b" " * (FILE_BYTES_MAX + 1))
    with pytest.raises(RulesError, match="it has more than 1048576 bytes"):
        RulesFile(path).read()


def test_rules_of_another_database_conflict_only_with_each_other() -> None:
    row = '[[rule]]\nname = "{}"\nkeys = "a"\nowner = "state"\ndatabase = {}\n'
    assert [rule.database for rule in parse_rules(row.format("one", 1) + row.format("two", 2), "")] == [1, 2]
    (found,) = mistakes_of(row.format("one", 1) + row.format("two", 1))
    assert "conflicts with rule 1 'one'" in found
    for wrong in ("-1", "true", '"1"', str(2**31)):
        assert mistakes_of(row.format("one", wrong))[0].startswith("rule 1 'one' (line 1): database is ")


def test_rule_moves_format_that_it_covers_into_its_database() -> None:
    text = '[[rule]]\nkeys = "a:<x>"\nowner = "state"\ndatabase = 2\n'
    made = KeyMatcher([OwnedFormat("a:<b>", "job:a"), OwnedFormat("<b>", "job:b")], parse_rules(text, ""))
    assert [made.owner_of(b"a:1", each) for each in (0, 1, 2)] == ["job:b", None, "job:a"]
    assert made.key_owners == {
        0: [KeyOwner(b"*", Owner.STATE)],
        2: [KeyOwner(b"a:*", Owner.STATE)],
    }


@pytest.mark.parametrize(("text", "seconds"), [("500ms", 0.5), ("5s", 5), ("1.5m", 90), ("1h", 3600)])
def test_rule_sets_cache_time_of_upstream_replies(text: str, seconds: float) -> None:
    (rule,) = parse_rules(f'[[rule]]\nkeys = "a:<x>"\nowner = "upstream"\ncache = "{text}"\n', "")
    assert rule.cache_s == seconds
    assert KeyMatcher((), [rule]).key_owners == {0: [KeyOwner(b"a:*", Owner.UPSTREAM, is_cached=True)]}


@pytest.mark.parametrize("value", ["5", "0s", "2h", "s", "-1s", "5 s"])
def test_invalid_time_is_refused(value: str) -> None:
    found = mistakes_of(f'[[rule]]\nkeys = "a"\nowner = "state"\ncache = "{value}"\n')
    assert len(found) == 2 and "'cache' is for owner = \"upstream\"" in found[0]
    assert found[1].endswith('it must be a time such as "500ms", "5s" or "2m", at most 1h, or "tracking"')


def test_replies_may_be_cached_exactly_until_change() -> None:
    text = '[[rule]]\nkeys = "a:<x>"\nowner = "upstream"\ncache = '
    (exact,), (timed,) = (parse_rules(f'{text}"{cache}"\n', "") for cache in ("tracking", "5s"))
    assert exact.is_cached_exactly and not timed.is_cached_exactly


@pytest.mark.parametrize(
    ("first", "second", "key"),
    [
        ("a:<x>", "<x>:b", "a:x:b"),
        ("a:<x>:c:<y>", "a:<x>:d:<y>", "a:x:c:x:d:x"),
        ("a:<x>", "b:<x>", None),
        ("a:<x>:c", "a:<x>:d", None),
        ("a:1", "a:<x>", None),  # the narrow one first
        ("a:<x>:c", "a:<x>", None),
    ],
)
def test_rules_that_share_some_keys_are_named(first: str, second: str, key: str | None) -> None:
    rules = parse_rules("".join(f'[[rule]]\nkeys = "{each}"\nowner = "state"\n' for each in (first, second)), "")
    expected = (
        f"rules '{first}' and '{second}' have keys in common, such as '{key}': '{first}' decides about them, because "
        "it comes first"
    )
    assert overlaps(rules) == ([] if key is None else [expected])
    assert overlaps([rules[0], dataclasses.replace(rules[1], database=1)]) == []


def test_file_has_few_warnings() -> None:
    text = "".join(
        f'[[rule]]\nkeys = "{n}<x>"\nowner = "state"\n[[rule]]\nkeys = "<x>a{n}"\nowner = "state"\n' for n in range(9)
    )
    assert len(overlaps(parse_rules(text, ""))) == 20
