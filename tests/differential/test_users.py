"""Users' rules: any rules are taken, shown and obeyed here as by a real server.

A real server of 7.0 shows the rules about commands in its own words, which it makes from what they come to. So ours are
given to it as well: what it makes of them has to be what it made of the rules themselves.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compat.conformance.pair import Pair
from compat.conformance.wire import Connection, Reply
from compat.examples import examples
from resp_server.acl.selector import CATEGORIES, RuleError
from resp_server.acl.user import DEFAULT_USER, User
from resp_server.commands import command_table

TABLE = command_table()
# Commands that both have: reads, writes, both, channels, subcommands, several keys. K and C stand for keys, channels.
REQUESTS = [
    line.strip().encode().split()
    for line in """
        get K; set K v; mget K K2; del K K2; exists K; strlen K2; getdel K; rename K K2; hget K f; lmove K K2 left left
        object encoding K; zunion 2 K K2; sintercard 2 K K2; ping; config get x; config set x y; client id; acl whoami
        client kill x; publish C m; dbsize; subscribe C C2; psubscribe C; ssubscribe C2; unsubscribe C; spublish C m
        select 0; select 1; auth x; hello; xread streams K K2 0 0; eval x 1 K; keys *; scan 0; multi; watch K
        debug sleep 0; copy K K2; touch K; lcs K K2; getex K; memory usage K; bitop and K K2
    """.strip()
    .replace("\n", ";")
    .split(";")
]
KEYS = [b"a", b"a:b", b"b:1", b"foo*", b"x[y]"]
PATTERNS = [b"a", b"a*", b"a:*", b"*b", b"*", b"[a-b]:?", b"foo\\*", b"x[", b"", b"**", b"x\\[y\\]", b"b:1"]
NAMES = b"""
    get GET set config config|get Config|Set client client|id acl publish psubscribe mget del object object|encoding
    select nothing config|nothing eval zunion hget ping auth watch
""".split()

patterns = st.sampled_from(PATTERNS)
signs = st.sampled_from([b"~", b"%R~", b"%W~", b"%rw~", b"%WR~", b"%RR~", b"%~", b"%X~", b"%R", b"%"])
key_rules = st.builds(bytes.__add__, signs, patterns)
channel_rules = st.builds(bytes.__add__, st.just(b"&"), patterns)
categories = st.sampled_from([b"@" + each.encode() for each in CATEGORIES] + [b"@READ", b"@all", b"@nothing", b"@"])
named = st.one_of(
    st.sampled_from(NAMES), categories, st.sampled_from([b"select|0", b"get|x", b"config|get|x", b"get|", b"|"])
)
command_rules = st.builds(bytes.__add__, st.sampled_from([b"+", b"-"]), named)
plain_rules = st.sampled_from(
    [b"allkeys", b"resetkeys", b"allchannels", b"resetchannels", b"allcommands", b"nocommands", b"~*", b"&*", b"+@all",
     b"-@all", b"ALLKEYS", b"+@All"]
)  # fmt: skip
selector_rules = st.one_of(command_rules, command_rules, key_rules, channel_rules, plain_rules)
selectors = st.lists(selector_rules, max_size=4).map(lambda rules: b"(" + b" ".join(rules) + b")")
hashes = st.sampled_from([b"a" * 64, b"0" * 64, b"A" * 64, b"a" * 63])
passwords = st.builds(bytes.__add__, st.sampled_from([b">", b"<"]), st.sampled_from([b"one", b"two", b""])) | st.builds(
    bytes.__add__, st.sampled_from([b"#", b"!"]), hashes
)
user_rules = st.sampled_from(
    [b"on", b"off", b"nopass", b"resetpass", b"reset", b"clearselectors", b"sanitize-payload", b"skip-sanitize-payload",
     b"ON", b"nonsense", b"(", b"(+get", b"+set)", b"x y"]
)  # fmt: skip


def opens_within(words: Sequence[bytes]) -> bool:
    """Return whether a selector begins inside one that has not ended: Redis before 7.2 forgets what that one was."""
    is_open = False
    for word in words:
        if word.startswith(b"(") and not word.endswith(b")"):
            if is_open:
                return True
            is_open = True
        elif word.endswith(b")"):
            is_open = False
    return False


rules = st.lists(
    st.one_of(selector_rules, selector_rules, selector_rules, selectors, passwords, user_rules), min_size=1, max_size=7
).filter(lambda words: not opens_within(words))
asked = st.lists(
    st.tuples(st.sampled_from(REQUESTS), st.sampled_from(KEYS), st.sampled_from(KEYS)), min_size=1, max_size=6
)

USER, COPY = b"somebody", b"copied"


class Both:
    """A connection to a server of each kind."""

    def __init__(self, redis: Connection, sparkis: Connection) -> None:
        self.redis, self.sparkis = redis, sparkis

    def call(self, *words: bytes) -> tuple[Reply, Reply]:
        return self.redis.call(*words), self.sparkis.call(*words)


@pytest.fixture(scope="module")
def both(pair: Pair) -> Iterator[Both]:
    with pair.redis.connect() as redis, pair.sparkis.connect() as sparkis:
        yield Both(redis, sparkis)
        for connection in (redis, sparkis):
            connection.call("ACL", "DELUSER", USER, COPY)


def denied(reply: Reply) -> tuple[str, bytes] | bytes:
    """Return what DRYRUN says, without the words that changed between versions."""
    match = re.fullmatch(
        rb".* user (?:\S+ )?has no permissions to (?:run|access) the '(.*)' (\w+)", b" " + reply.value, re.I
    )
    return (match[2].decode(), match[1]) if match else bytes(reply.value)


def rights_of(reply: Reply) -> dict[bytes, Any]:
    """Return GETUSER's fields by their names."""
    flat = reply.plain
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    fields[b"flags"] = sorted(fields[b"flags"])
    fields[b"selectors"] = [dict(zip(each[::2], each[1::2], strict=True)) for each in fields[b"selectors"]]
    return fields


def without_commands(fields: dict[bytes, Any]) -> dict[bytes, Any]:
    kept = {name: value for name, value in fields.items() if name not in (b"commands", b"selectors")}
    return kept | {b"selectors": [without_commands({**each, b"selectors": []}) for each in fields[b"selectors"]]}


@settings(max_examples=examples(75), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=rules, second=rules, asked=asked)
def test_rules_are_taken_shown_and_obeyed_as_by_real_server(
    both: Both, first: Sequence[bytes], second: Sequence[bytes], asked: Sequence[tuple[Sequence[bytes], bytes, bytes]]
) -> None:
    both.call(b"ACL", b"SETUSER", USER, b"reset")
    for given_rules in (first, second):
        theirs, ours = both.call(b"ACL", b"SETUSER", USER, *given_rules)
        assert ours.raw == theirs.raw
    theirs, ours = both.call(b"ACL", b"GETUSER", USER)
    assert without_commands(rights_of(ours)) == without_commands(rights_of(theirs))
    line = next(each for each in both.sparkis.call("ACL", "LIST").plain if each.split()[1] == USER)
    both.redis.call("ACL", "SETUSER", COPY, "reset")
    assert both.redis.call("ACL", "SETUSER", COPY, *line.split(b" ")[2:]).value == b"OK", line
    assert rights_of(both.redis.call("ACL", "GETUSER", COPY)) == rights_of(theirs), line
    for request, key, other in asked:
        named = {b"K": key, b"K2": other, b"C": key, b"C2": other}
        words = [named.get(word, word) for word in request]
        theirs, ours = both.call(b"ACL", b"DRYRUN", USER, *words)
        assert denied(ours) == denied(theirs), words


@settings(max_examples=examples(100), deadline=None)
@given(given_rules=rules)
def test_shown_rules_of_user_make_same_user(given_rules: Sequence[bytes]) -> None:
    user = User(b"u", TABLE)
    for rule in given_rules:
        try:
            user.apply(rule)
        except RuleError:
            continue
    made = User.from_rule_lists(b"u", user.rule_lists, TABLE)
    assert made.rule_lists == user.rule_lists
    assert [each.commands for each in made.selectors] == [each.commands for each in user.selectors]
    assert [each.first_args for each in made.selectors] == [each.first_args for each in user.selectors]


ABOUT_USERS = """
    ACL WHOAMI; ACL CAT; ACL CAT nothing; ACL CAT read x; ACL GETUSER nobody; ACL DRYRUN nobody get x
    ACL DRYRUN default nothing; ACL DRYRUN default get; ACL DRYRUN default config nothing; ACL DRYRUN default get x
    ACL GENPASS 0; ACL GENPASS 4097; ACL GENPASS x; ACL DELUSER default; ACL DELUSER nobody; ACL LOG x; ACL LOG RESET
    ACL LOG; ACL LOG -5; ACL LOAD; ACL SAVE; ACL USERS; ACL NOTHING; ACL; ACL SETUSER; ACL WHOAMI x
"""


@pytest.mark.parametrize("line", [each.strip().encode() for each in ABOUT_USERS.strip().replace("\n", ";").split(";")])
def test_commands_about_users_answer_as_real_server(both: Both, line: bytes) -> None:
    both.call(b"ACL", b"DELUSER", USER, COPY)
    theirs, ours = both.call(*line.split())
    assert ours.raw == theirs.raw


@pytest.mark.parametrize("bits", [1, 3, 4, 5, 8, 255, 256, 4096])
def test_passwords_are_as_long_as_those_of_real_server(both: Both, bits: int) -> None:
    theirs, ours = both.call(b"ACL", b"GENPASS", b"%d" % bits)
    assert len(ours.value) == len(theirs.value)
    assert set(ours.value) <= set(string.hexdigits.lower().encode())


def test_default_user_is_shown_as_real_servers(both: Both) -> None:
    theirs, ours = both.call(b"ACL", b"GETUSER", DEFAULT_USER)
    assert rights_of(ours)[b"flags"] == [b"nopass", b"on", b"sanitize-payload"]  # the last one since 7.2
    assert rights_of(ours) | {b"flags": []} == rights_of(theirs) | {b"flags": []}


DENIED = [
    (b"get a", b"NOPERM User somebody has no permissions to run the 'get' command"),
    (b"mget b:1 x", b"NOPERM No permissions to access a key"),
    (b"config get x", b"NOPERM User somebody has no permissions to run the 'config|get' command"),
    (b"mget", b"ERR wrong number of arguments for 'mget' command"),
    (b"nothing", b"ERR unknown command 'nothing', with args beginning with: "),
    (b"set b:1 v", b"NOPERM User somebody has no permissions to run the 'set' command"),
]


def test_denials_have_order_and_log_of_redis(both: Both, pair: Pair) -> None:
    both.call(b"ACL", b"LOG", b"RESET")
    both.call(b"ACL", b"SETUSER", USER, b"reset", b"on", b">pass", b"+mget", b"+multi", b"+exec", b"~b:*")
    with pair.redis.connect() as redis, pair.sparkis.connect() as sparkis:
        for connection in (redis, sparkis):
            assert connection.call("AUTH", USER, "wrong").value.startswith(b"WRONGPASS ")
            assert connection.call("AUTH", USER, "pass").value == b"OK"
        for line, expected in DENIED:
            theirs, ours = redis.call(*line.split()), sparkis.call(*line.split())
            assert ours.value == expected
            assert theirs.value.split(b" ")[0] == ours.value.split(b" ")[0]
        for connection in (redis, sparkis):
            for line in (b"multi", b"mget b:1", b"get a"):
                connection.call(*line.split())
            aborted = b"EXECABORT Transaction discarded because of previous errors."
            assert connection.call("EXEC").value == aborted
    theirs, ours = both.call(b"ACL", b"LOG", b"100")
    assert len(ours.plain) == len(theirs.plain)
    for mine, his in zip(ours.plain, theirs.plain, strict=True):
        row, real = (dict(zip(each[::2], each[1::2], strict=True)) for each in (mine, his))
        for name in (b"count", b"reason", b"context", b"object", b"username"):
            assert row[name] == real[name]
        assert row.keys() >= real.keys()
