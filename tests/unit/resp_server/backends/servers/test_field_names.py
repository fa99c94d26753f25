"""Names of fields of states' hashes: which fields to read for a pattern, and the names that replies give."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from resp_server.backends.routing.key_matcher import KeyMatcher
from resp_server.backends.routing.rules import parse_rules
from resp_server.backends.servers.field_names import FieldRules, NamedHash, is_failure, may_match
from resp_server.protocol.glob import matcher
from resp_server.protocol.replies import encode
from resp_server.raw_replies.raw_reply import RawReply

RULES = parse_rules(
    """
[[rule]]
keys = "dash/<account>/apdex"
owner = "state"
state_key = "golden:<account>"
field = "a"

[[rule]]
keys = "dash/<account>/score"
owner = "state"
state_key = "golden:<account>"
field = "s"

[[rule]]
keys = "dash/<account>/<metric>"
owner = "state"
state_key = "golden:<account>"
field = "<metric>"
""",
    "the test",
)
FEW, ALL = (FieldRules(rules, KeyMatcher((), RULES).decider) for rules in (RULES[:2], RULES))


def names(rules: FieldRules, reply: RawReply) -> list[bytes]:
    """Return the names that the reply about golden:7 gives."""
    named = rules.of_hash(b"golden:7", lambda start, is_whole: True)
    assert named is not None
    steps = named.fields_in(reply)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return [each.name for field in end.value for each in rules.names(named.key, named.rules, field)]


def test_single_fields_are_read_without_others() -> None:
    assert FEW.of_hash(b"golden:7", lambda start, is_whole: start == b"dash/7/score" and is_whole) == (
        NamedHash(b"golden:7", RULES[1:2])
    )
    named = FEW.of_hash(b"golden:7", lambda start, is_whole: True)
    assert named is not None and sorted(named.request) == sorted((b"HTTL", b"golden:7", b"FIELDS", b"2", b"a", b"s"))
    assert named.only_fields is not None
    reply = encode([-2 if field == b"a" else -1 for field in named.only_fields], 2)
    assert names(FEW, reply) == [b"dash/7/score"]


def test_all_fields_have_names_by_which_clients_find_them() -> None:
    named = ALL.of_hash(b"golden:7", lambda start, is_whole: True)
    assert named is not None and named.request == (b"HKEYS", b"golden:7")
    # dash/7/apdex is the field `a` by the first rule, so the field `apdex` has no name.
    assert names(ALL, encode([b"a", b"apdex", b"x/y", b""], 2)) == [
        *(b"dash/7/apdex", b"dash/7/a", b"dash/7/x/y", b"dash/7/"),
    ]


def test_key_that_is_no_hash_has_no_fields_and_other_errors_are_failures() -> None:
    wrong = b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n"
    assert names(FEW, wrong) == names(ALL, wrong) == []
    assert not is_failure(wrong) and is_failure(b"-TRYAGAIN later\r\n") and not is_failure(b"*0\r\n")
    assert ALL.of_hash(b"other:7", lambda start, is_whole: True) is None


texts = st.text("ab*?[]^\\-/", max_size=6).map(str.encode)


@given(texts, texts, texts)
def test_pattern_that_matches_name_may_match_how_it_begins(pattern: bytes, start: bytes, rest: bytes) -> None:
    if matcher(pattern)(start + rest):
        assert may_match(pattern, start, False)
        assert may_match(pattern, start + rest, True)
