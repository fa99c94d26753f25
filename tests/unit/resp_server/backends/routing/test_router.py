"""The destination of a request."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from resp_server.backends.routing.ownership import Ownership
from resp_server.backends.routing.route import (
    AllKeysRoute,
    CacheableRead,
    LocalRoute,
    Route,
    SelectRoute,
    SplitRoute,
    StatesRoute,
    UpstreamRoute,
    changed_keys,
)
from resp_server.backends.routing.router import KEYS_AT_ONCE, Router
from resp_server.backends.routing.rules import parse_rules
from resp_server.command.command_facts import facts_in
from resp_server.command.spec import CommandSpec
from resp_server.commands import command_table
from resp_server.protocol.errors import GenericError, LoadingError
from resp_server.protocol.request_parser import LongRequest

TABLE = command_table()


def router() -> Router:
    ownership = Ownership()
    ownership.learn({"job": {"speed": "job:speed:<car>"}})
    ownership.complete()
    return Router(TABLE, ownership)


def kind_of_route(line: str, made: Router | None = None) -> type[Route]:
    route = (made or router()).route([word.encode() for word in line.split(" ")])
    assert route is not None
    return type(route)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        *(
            (line, UpstreamRoute)
            for line in ("GET a", "set a 1", "EVAL x 0", "TIME", "FLUSHALL", "COMMAND", "PUBLISH a b")
        ),
        *(
            (line, UpstreamRoute)
            for line in ("INFO", "INFO memory", "CONFIG GET x", "XREAD COUNT 1 STREAMS BLOCK 0", "GET")
        ),
        *(
            (line, UpstreamRoute)
            for line in ("MEMORY USAGE a", "MEMORY DOCTOR", "OBJECT HELP", "SPUBLISH job:speed:1 x", "ROLE")
        ),
        *(
            (line, UpstreamRoute)
            for line in ("SORT a BY job:speed:*", "SWAPDB 2 1", "SCRIPT LOAD x", "FCALL f 1 a", "OBJECT")
        ),
        *(
            (line, StatesRoute)
            for line in ("GET job:speed:1", "MGET job:speed:1 job:speed:2", "OBJECT ENCODING job:speed:1")
        ),
        *(
            (line, StatesRoute)
            for line in ("WATCH job:speed:1", "TYPE job:speed:1", "HGETALL job:speed:1", "TTL job:speed:1")
        ),
        *((line, SplitRoute) for line in ("MGET a job:speed:1", "EXISTS job:speed:1 a", "touch a job:speed:1")),
        *(
            (line, LocalRoute)
            for line in ("PING", "HELLO 3", "CLIENT ID", "AUTH x", "MULTI", "EXEC", "STATE OWNERS", "ACL WHOAMI")
        ),
        *((line, LocalRoute) for line in ("CLUSTER INFO", "SLOWLOG GET", "UNSUBSCRIBE")),
        *((line, StatesRoute) for line in ("INFO proxy", "INFO SPARKIS memory", "STATE JOBS", "STATE LAG")),
        *((line, StatesRoute) for line in ("STATE LOCATE a", "STATE MGET a b", "STATE HISTORY a")),
        ("STATE DESCRIBE job:speed", StatesRoute),
        *((line, AllKeysRoute) for line in ("SCAN 0", "KEYS *", "dbsize", "RANDOMKEY")),
        ("SELECT 0", SelectRoute),
    ],
)
def test_request_goes_to_owner_of_its_keys(line: str, expected: type[Route]) -> None:
    assert kind_of_route(line) is expected


def test_split_request_has_positions_of_states_keys() -> None:
    route = router().route([b"MGET", b"a", b"job:speed:1", b"b", b"job:speed:2"])
    assert route is not None and list(route.state_keys) == [2, 4]


@pytest.mark.parametrize(
    "line", ["SET job:speed:1 x", "MSET a 1 job:speed:1 2", "EVAL x 1 job:speed:1", "SORT a STORE job:speed:1"]
)
def test_write_of_states_key_is_refused_by_name(line: str) -> None:
    with pytest.raises(GenericError, match=r"^key 'job:speed:1' is owned by state job:speed$"):
        kind_of_route(line)


def test_number_of_words_is_checked_before_owner() -> None:
    with pytest.raises(GenericError, match="wrong number of arguments"):
        kind_of_route("SET job:speed:1")


def test_error_of_unsplittable_request_names_owners_of_its_keys() -> None:
    with pytest.raises(GenericError, match=r"key 'a' is the upstream's, key 'job:speed:1' is owned by state job:speed"):
        kind_of_route("SINTER a job:speed:1")


@pytest.mark.parametrize(
    ("line", "is_blocking"),
    [
        *((line, True) for line in ("BLPOP a 0", "BZMPOP 0 1 a MIN", "WAIT 0 0", "waitaof 0 0 0")),
        *((line, True) for line in ("XREAD COUNT 1 BLOCK 0 STREAMS a 0", "XREADGROUP GROUP g c BLOCK 0 STREAMS a >")),
        *(
            (line, False)
            for line in ("LPOP a", "XREAD COUNT 1 STREAMS BLOCK 0", "XREADGROUP GROUP block c STREAMS a >")
        ),
    ],
)
def test_request_that_may_wait_for_other_clients_is_known(line: str, is_blocking: bool) -> None:
    route = router().route([word.encode() for word in line.split(" ")])
    assert type(route) is UpstreamRoute and route.is_blocking is is_blocking


def test_watched_keys_may_be_of_both_backends() -> None:
    route = router().route([b"WATCH", b"a", b"job:speed:1", b"b"])
    assert type(route) is SplitRoute and list(route.state_keys) == [2]
    assert kind_of_route("WATCH a b") is UpstreamRoute


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("GET", "wrong number of arguments for 'get' command"),
        ("OBJECT ENCODING", "wrong number of arguments for 'object|encoding' command"),
        ("OBJECT NOPE a", "unknown subcommand 'NOPE'. Try OBJECT HELP."),
        ("SAVE", "Command not allowed inside a transaction"),
    ],
)
def test_command_that_upstream_would_not_queue_is_refused(line: str, error: str) -> None:
    made, request = router(), [word.encode() for word in line.split(" ")]
    route = made.route(request)
    assert route is not None
    with pytest.raises(GenericError, match=re.escape(error)):
        made.commands.check_form(route.routed, request)
    made.commands.take_facts({"object": CommandSpec("", "", -2, subcommands={"freq": CommandSpec("", "", 3)})})
    with pytest.raises(GenericError):
        made.commands.check_form(route.routed, request)


def test_command_that_upstream_does_not_have_is_not_queued() -> None:
    made = router()
    made.commands.take_facts({"get": CommandSpec("", "", 2)})
    route = made.route([b"HEXPIRE", b"a"])
    assert route is not None
    with pytest.raises(GenericError, match="unknown command 'HEXPIRE'"):
        made.commands.check_form(route.routed, [b"HEXPIRE", b"a"])


def test_no_key_is_answered_before_owners_are_known() -> None:
    unknowing = Router(TABLE, Ownership())
    for line in ("GET a", "SET a 1", "MGET a b", "EVAL x 1 a", "SCAN 0", "KEYS *", "DBSIZE", "RANDOMKEY"):
        with pytest.raises(LoadingError):
            kind_of_route(line, unknowing)
    assert kind_of_route("TIME", unknowing) is UpstreamRoute


ROW = b"*10\r\n$8\r\njson.set\r\n:-4\r\n*1\r\n+write\r\n:1\r\n:1\r\n:1\r\n*0\r\n*0\r\n*1\r\n*6\r\n"
ROW += b"$5\r\nflags\r\n*1\r\n+RW\r\n"
INDEX = b"$12\r\nbegin_search\r\n*4\r\n$4\r\ntype\r\n$5\r\nindex\r\n$4\r\nspec\r\n*2\r\n$5\r\nindex\r\n:1\r\n"
RANGE = b"$9\r\nfind_keys\r\n*4\r\n$4\r\ntype\r\n$5\r\nrange\r\n$4\r\nspec\r\n*6\r\n"
RANGE += b"$7\r\nlastkey\r\n:0\r\n$7\r\nkeystep\r\n:1\r\n$5\r\nlimit\r\n:0\r\n*0\r\n"


def test_modules_command_is_known_from_upstreams_own_table() -> None:
    made = router()
    assert made.route([b"JSON.SET", b"a", b"$", b"1"]) is None
    made.commands.take_facts(facts_in(b"*1\r\n" + ROW + INDEX + RANGE))
    assert kind_of_route("JSON.SET a $ 1", made) is UpstreamRoute
    with pytest.raises(GenericError, match="is owned by state job:speed"):
        kind_of_route("JSON.SET job:speed:1 $ 1", made)


def test_command_with_unknown_keys_is_not_passed_on() -> None:
    made = router()
    made.commands.take_facts(
        {
            "mod.do": CommandSpec(
                "",
                "",
                key_specs=[
                    {
                        "flags": ["RW", "incomplete"],
                        "begin_search": {"type": "index", "spec": {"index": 1}},
                        "find_keys": {"type": "unknown", "spec": {}},
                    }
                ],
            )
        }
    )
    with pytest.raises(GenericError, match=r"does not say where the keys of 'mod\.do' are"):
        kind_of_route("MOD.DO a", made)
    assert made.needs_getkeys([b"MOD.DO", b"a"]) and not made.needs_getkeys([b"GET", b"a"])
    made.getkeys_cache.add([b"MOD.DO", b"a"], [b"a"])
    made.getkeys_cache.add([b"MOD.DO", b"a", b"job:speed:1"], [b"job:speed:1"])
    assert kind_of_route("MOD.DO a", made) is UpstreamRoute and not made.needs_getkeys([b"MOD.DO", b"a"])
    with pytest.raises(GenericError, match="key 'job:speed:1' is owned"):
        kind_of_route("MOD.DO a job:speed:1", made)
    for number in range(1024):
        made.getkeys_cache.add([b"MOD.DO", b"%d" % number], [])
    assert made.needs_getkeys([b"MOD.DO", b"a"])


def test_rows_of_redis_before_7_have_first_key_last_and_step() -> None:
    rows = b"*3\r\n*6\r\n$4\r\nmset\r\n:-3\r\n*1\r\n+write\r\n:1\r\n:-1\r\n:2\r\n"
    rows += b"*6\r\n$3\r\nmod\r\n:-1\r\n*1\r\n+movablekeys\r\n:0\r\n:0\r\n:0\r\n"
    rows += b"*6\r\n$4\r\ntime\r\n:1\r\n*0\r\n:0\r\n:0\r\n:0\r\n"
    made = router()
    made.commands.take_facts(facts_in(rows))
    with pytest.raises(GenericError, match="key 'job:speed:1' is owned"):
        kind_of_route("MSET a 1 job:speed:1 job:speed:2", made)
    assert kind_of_route("MSET a job:speed:1", made) is UpstreamRoute
    with pytest.raises(GenericError, match="does not say where"):
        kind_of_route("MOD a", made)


@pytest.mark.parametrize("reply", [b"-ERR no\r\n", b"+OK\r\n", b"*1\r\n+x\r\n", b"*1\r\n*2\r\n+x\r\n:1\r\n"])
def test_unexpected_reply_to_command_is_error(reply: bytes) -> None:
    with pytest.raises((ValueError, TypeError, LookupError)):
        facts_in(reply)


def test_spellings_without_end_are_not_remembered() -> None:
    made = router()
    for number in range(3000):
        assert made.route([b"nope%d" % number]) is None
        assert made.route([b"CLIENT", b"TRACKING"]) is not None
    assert len(made.commands._routed) <= 1024


def test_blocking_commands_need_dedicated_connection() -> None:
    made = router()
    made.commands.take_facts(
        {
            "mod.listen": CommandSpec("", "", flags=["pubsub"]),
            "mod.wait": CommandSpec("", "", flags=["blocking"]),
            "wait": CommandSpec("", "", flags=["noscript"]),  # as Redis 7.0 has it
        }
    )
    for line in ("MOD.LISTEN", "MOD.WAIT", "WAIT 1 0"):
        route = made.route(line.encode().split(b" "))
        assert route is not None and route.is_blocking and route.routed.is_subscription == (line == "MOD.LISTEN")


KEYS = 3 * KEYS_AT_ONCE
THEIRS, OURS = [b"%d" % at for at in range(KEYS)], [b"job:speed:%d" % at for at in range(KEYS)]
MIXED = [word for row in zip(THEIRS, OURS, strict=True) for word in row]


def routed_in_steps(*words: bytes, by: Router | None = None) -> tuple[Route | None, int]:
    """Return the route of a long request, and the number of steps."""
    steps, count = (by or router()).route_in_steps(LongRequest(words, 0)), 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value, count
        count += 1


@pytest.mark.parametrize("name", b"MGET EXISTS DEL MSET SUNION SUNIONSTORE PFCOUNT GET NO".split())
@pytest.mark.parametrize("keys", [THEIRS, OURS, MIXED, MIXED[:4]])
def test_long_request_is_routed_in_steps_as_short_one(name: bytes, keys: list[bytes]) -> None:
    words = [name, *keys]
    try:
        expected: object = router().route(words)
    except GenericError as error:
        with pytest.raises(GenericError, match=re.escape(str(error))):
            routed_in_steps(*words)
        return
    found, steps = routed_in_steps(*words)
    if type(expected) is SplitRoute and len(keys) > KEYS_AT_ONCE:
        assert type(found) is SplitRoute and found.is_in_chunks
        assert list(found.state_keys) == list(expected.state_keys)
    else:
        assert (type(found), found) == (type(expected), expected)
    assert steps >= len(keys) // 2 // KEYS_AT_ONCE or name in (b"GET", b"NO")


def test_request_beyond_limit_of_arguments_is_refused() -> None:
    with pytest.raises(GenericError, match=r"'xread' takes 32768 arguments through --upstream; split the request"):
        routed_in_steps(b"XREAD", *[b"x"] * 40_000)
    with pytest.raises(GenericError, match="a client may watch 16384 keys"):
        routed_in_steps(b"WATCH", *[b"x"] * 16_385)


def router_with_cache() -> Router:
    made = Ownership()
    made.take_rules(parse_rules('[[rule]]\nkeys = "page:<n>"\nowner = "upstream"\ncache = "5s"\n', ""))
    made.complete()
    return Router(TABLE, made)


@pytest.mark.parametrize(
    ("line", "cache_s", "changed"),
    [
        ("GET page:1", 5, ()),
        ("HGETALL page:1", 5, ()),
        *((line, 5, ()) for line in ("MGET page:1", "MGET page:1 page:2 page:1", "EXISTS page:1 page:2")),
        ("SINTER page:1 page:2", 5, ()),
        *((line, 0, ()) for line in ("GET a", "TTL page:1", "XINFO STREAM page:1", "PING", "TIME")),
        *(
            (line, 0, ())
            for line in ("MGET page:1 a", "SORT_RO page:1", "SRANDMEMBER page:1", "SPUBLISH page:1 x", "SUNION a b")
        ),
        ("SET page:1 x", 0, [b"page:1"]),
        ("RENAME page:1 b", 0, [b"page:1", b"b"]),
        ("EVAL x 2 page:1 b c", 0, [b"page:1", b"b"]),
        *((line, 0, None) for line in ("EVAL x 0", "FLUSHALL", "SWAPDB 2 1")),
    ],
)
def test_cacheable_replies_and_changed_keys_of_commands(line: str, cache_s: float, changed: list[bytes] | None) -> None:
    route = router_with_cache().route([word.encode() for word in line.split(" ")])
    assert route is not None
    use = route.use if type(route) is UpstreamRoute else None
    assert (use.cache_s if type(use) is CacheableRead else 0) == cache_s
    keys = changed_keys(route)
    assert keys is None if changed is None else list(keys or ()) == list(changed)


def test_reply_about_several_keys_is_cached_for_shortest_of_their_times() -> None:
    made = Ownership()
    rule = '[[rule]]\nkeys = "%s<n>"\nowner = "upstream"\ncache = "%s"\n'
    made.take_rules(parse_rules("".join(rule % row for row in (("a", "5s"), ("b", "3s"), ("c", "tracking"))), ""))
    made.complete()
    route = Router(TABLE, made).route([b"MGET", b"a1", b"b1", b"c1", b"a1"])
    assert type(route) is UpstreamRoute
    assert route.use == CacheableRead([b"a1", b"b1", b"c1"], cache_s=3, exact=[b"c1"])


@pytest.mark.parametrize(
    ("name", "changed"), [(b"MSET", None), (b"DEL", None), (b"RPUSH", [b"0"]), (b"MGET", ()), (b"WATCH", ())]
)
def test_any_cached_key_may_change_by_long_write_of_several_keys(name: bytes, changed: Sequence[bytes] | None) -> None:
    route, _ = routed_in_steps(name, *THEIRS, by=router_with_cache())
    assert type(route) is UpstreamRoute and type(route.use) is not CacheableRead
    assert changed_keys(route) == changed


def test_read_of_states_fields_does_not_wait_for_exactly_cached_keys() -> None:
    made = Ownership()
    field = '[[rule]]\nkeys = "fact/<n>/<m>"\nowner = "state"\nstate_key = "job:facts:<n>"\nfield = "<m>"\n'
    made.take_rules(parse_rules(f'{field}[[rule]]\nkeys = "page:<n>"\nowner = "upstream"\ncache = "tracking"\n', ""))
    made.complete()
    for line, can_overtake_cache in ((b"EXISTS fact/7/a fact/7/b", False), (b"EXISTS fact/7/a page:1", True)):
        route = Router(TABLE, made).route(line.split())
        assert type(route) is SplitRoute and route.can_overtake_cache is can_overtake_cache
