"""Sets, sorted sets and their combinations: small ones at once, large ones in steps, with the same replies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import pytest

from compat.conformance.wire import Reply, reply_at
from resp_server.commands import dump, random_items, sliced_reply, sort
from resp_server.limits import LOOKUPS_PER_STEP
from resp_server.pipeline.context import ServerContext
from resp_server.settings.server import ServerConfig
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from state_backend.store.keyspace import Job, Keyspace
from state_backend.store.memory_store import MemoryStore
from tests.builders import apply_epoch
from tests.unit.resp_server.commands.stepping import SteppingClient
from tests.unit.resp_server.conftest import NOW_MS, TABLE

STATES = [
    StateDescriptor("text", value="value", key_format="<key>"),
    StateDescriptor("map", value="value", field="field", key_format="map:<key>"),
    StateDescriptor("list", value="value", kind="list", key_format="list:<key>"),
    StateDescriptor("set", member="member", key_format="set:<key>"),
    StateDescriptor("ranks", member="member", score="score", key_format="ranks:<key>"),
]
LARGE = 1100  # three steps of a reply
EVENS = [b"m%04d" % number for number in range(0, 2 * LARGE, 2)]
THIRDS = [b"m%04d" % number for number in range(0, 2 * LARGE, 3)]
SCORES = {member: float(Random(member).randrange(200)) for member in EVENS}
CHANGES = [
    *(Change("text", Op.PUT, b"weight:" + member, value=b"%d" % -number) for number, member in enumerate(EVENS)),
    *(Change("map", Op.PUT, b"map:large", field=member, value=b"v" + member) for member in EVENS),
    *(Change("list", Op.APPEND, b"list:large", value=member) for member in reversed(EVENS)),
    *(Change("set", Op.PUT, b"set:small", field=member, value=b"") for member in (b"a", b"b", b"m0006")),
    *(Change("set", Op.PUT, b"set:even", field=member, value=b"") for member in EVENS),
    *(Change("set", Op.PUT, b"set:third", field=member, value=b"") for member in THIRDS),
    *(Change("ranks", Op.PUT, b"ranks:small", field=member, value=b"2.5") for member in (b"a", b"m0006", b"z")),
    *(Change("ranks", Op.PUT, b"ranks:even", field=member, value=b"%r" % score) for member, score in SCORES.items()),
]


@pytest.fixture(scope="module")
def keyspace() -> Keyspace:
    store = MemoryStore("g1")
    apply_epoch(store, STATES, CHANGES, 0, clock_ms=NOW_MS)
    found = Keyspace()
    found.put(Job("job", "g1", STATES, store, is_stale=False))
    return found


@pytest.fixture
def ask(keyspace: Keyspace) -> Callable[..., Reply]:
    client = SteppingClient(ServerContext(ServerConfig(), keyspace, TABLE, clock=lambda: NOW_MS))

    def ask(line: str, protocol: int = 3) -> Reply:
        client.session.protocol = protocol
        raw = client.ask(line)
        reply, end = reply_at(raw, 0)
        assert end == len(raw), line
        return reply

    return ask


@pytest.fixture
def in_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Return a function from whose call on all replies are made in short steps."""

    def begin() -> None:
        monkeypatch.setattr(sliced_reply, "BYTES_AT_ONCE_MAX", -1)
        monkeypatch.setattr(dump, "AT_ONCE_BYTES_MAX", 0)
        monkeypatch.setattr(random_items, "CHUNK_DRAWS", 2)
        monkeypatch.setattr(sliced_reply, "SORTED_RUN_ITEMS", 100)

    yield begin


LINES = [
    "SMEMBERS set:small",
    "SMEMBERS set:even",
    "SMISMEMBER set:even m0000 m0001 m0002",
    "SINTER set:even set:third",
    "SINTER set:small set:even set:third",
    "SINTER set:even missing",
    "SUNION set:even set:third set:small set:even",
    "SDIFF set:even set:third set:small",
    "SDIFF set:small missing set:third",
    "SINTERCARD 2 set:even set:third",
    "SINTERCARD 2 set:even set:third LIMIT 300",
    "ZRANGE ranks:even 0 -1",
    "ZRANGE ranks:even 10 700 WITHSCORES",
    "ZRANGE ranks:even 10 700 REV WITHSCORES",
    "ZRANGEBYSCORE ranks:even (5 150 WITHSCORES LIMIT 3 900",
    "ZREVRANGEBYSCORE ranks:even 150 (5 LIMIT 3 900",
    "ZMSCORE ranks:even m0000 m0001",
    "ZUNION 3 ranks:even set:third ranks:small WITHSCORES",
    "ZUNION 2 ranks:even set:third WEIGHTS 2 -1 AGGREGATE MIN WITHSCORES",
    "ZINTER 2 set:third ranks:even WITHSCORES",
    "ZINTER 2 ranks:even ranks:small AGGREGATE MAX WITHSCORES",
    "ZDIFF 2 ranks:even set:third WITHSCORES",
    "ZINTERCARD 2 ranks:even set:third LIMIT 100",
    "SORT_RO list:large ALPHA LIMIT 5 1000",
    "SORT_RO set:even BY weight:* LIMIT 0 600",
    "SORT_RO set:third BY weight:* DESC GET # GET weight:* LIMIT 0 400",
    "SORT_RO list:large BY nosort DESC LIMIT 3 700",
    "SORT_RO ranks:even BY nosort LIMIT 700 5",
    "SORT_RO list:large",
    "DUMP set:even",
    "DUMP ranks:small",
    "DUMP map:large",
    "BITFIELD_RO weight:m0002 GET u8 0 GET i5 #1",
    "BITCOUNT weight:m0020",
    "BITPOS weight:m0020 1",
]
# The order of these replies is not defined.
WITHOUT_ORDER = ("SMEMBERS", "SINTER ", "SUNION", "SDIFF")


@pytest.mark.parametrize("line", LINES)
def test_reply_in_steps_equals_reply_at_once(
    ask: Callable[..., Reply], in_steps: Callable[[], None], line: str
) -> None:
    at_once = [ask(line, protocol) for protocol in (2, 3)]
    in_steps()
    for before, after in zip(at_once, (ask(line, protocol) for protocol in (2, 3)), strict=True):
        if line.startswith(WITHOUT_ORDER):
            assert (after.type, sorted(after.plain)) == (before.type, sorted(before.plain))
            assert len(set(after.plain)) == len(after.plain)
        else:
            assert after.raw == before.raw


def test_set_operations_equal_python_sets(ask: Callable[..., Reply]) -> None:
    even, third, small = set(EVENS), set(THIRDS), {b"a", b"b", b"m0006"}
    assert set(ask("SINTER set:even set:third").plain) == even & third
    assert set(ask("SUNION set:even set:third set:small").plain) == even | third | small
    assert set(ask("SDIFF set:even set:third set:small").plain) == even - third - small
    assert ask("SINTERCARD 2 set:third set:even").value == len(even & third)


def test_sorted_set_operations_sort_by_score_and_member(ask: Callable[..., Reply]) -> None:
    scores = {member: SCORES.get(member, 0.0) + (member in set(THIRDS)) for member in {*EVENS, *THIRDS}}
    expected = [member for member, _ in sorted(scores.items(), key=lambda pair: (pair[1], pair[0]))]
    assert ask("ZUNION 2 ranks:even set:third").plain == expected
    common = [member for member in expected if member in SCORES and member in set(THIRDS)]
    assert ask("ZINTER 2 ranks:even set:third").plain == common


@pytest.mark.parametrize("count", [1, 40, pytest.param(700, marks=pytest.mark.slow), LARGE, LARGE + 100])
@pytest.mark.parametrize("name", ["SRANDMEMBER set:even", "ZRANDMEMBER ranks:even", "HRANDFIELD map:large"])
def test_random_items_are_distinct_with_positive_count_only(ask: Callable[..., Reply], name: str, count: int) -> None:
    once = ask(f"{name} {count}").plain
    assert len(once) == len(set(once)) == min(count, LARGE)
    repeated = ask(f"{name} -{count}").plain
    assert len(repeated) == count
    assert {*once, *repeated} <= set(EVENS)


def test_random_items_cover_small_set_and_spread_over_large_one(ask: Callable[..., Reply]) -> None:
    assert {ask("SRANDMEMBER set:small").value for _ in range(200)} == {b"a", b"b", b"m0006"}
    assert len({ask("SRANDMEMBER set:even").value for _ in range(300)}) > 150
    assert len({ask("ZRANDMEMBER ranks:even").value for _ in range(300)}) > 150


def test_too_many_repeated_items_are_error(ask: Callable[..., Reply]) -> None:
    for name in ("SRANDMEMBER set:small", "ZRANDMEMBER ranks:small", "HRANDFIELD map:large"):
        assert b"at most 10000000 items" in ask(f"{name} -10000001").raw
    assert ask("SRANDMEMBER missing -10000001").raw == b"*0\r\n"


def test_memory_of_command_is_bounded(ask: Callable[..., Reply], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_reply, "WORKING_BYTES_MAX", 10_000)
    for line in ("SUNION set:even set:third", "ZUNION 2 ranks:even set:third", "SORT_RO list:large ALPHA"):
        assert b"intermediate results exceed 10000 bytes" in ask(line).raw


def test_lexicographic_ranges_return_members_in_order(ask: Callable[..., Reply]) -> None:
    assert ask("ZRANGEBYLEX ranks:small - +").plain == [b"a", b"m0006", b"z"]
    assert ask("ZREVRANGEBYLEX ranks:small (z [a").plain == [b"m0006", b"a"]
    assert ask("ZLEXCOUNT ranks:small + -").value == 0


def test_large_range_in_resp2_is_flattened_pairs_of_resp3(ask: Callable[..., Reply]) -> None:
    flat = ask("ZRANGE ranks:even 0 -1 WITHSCORES", 2).plain
    pairs = ask("ZRANGE ranks:even 0 -1 WITHSCORES", 3).value
    assert flat == [part for pair in pairs for part in pair.plain]
    assert len(pairs) == LARGE


def test_step_of_sort_is_bounded_for_any_patterns(keyspace: Keyspace) -> None:
    options = sort.SortOptions(count=3, is_alpha=True, get_patterns=[b"#", b"weight:*"] * 500)
    parts = list(sort._chunks(keyspace.view(NOW_MS), b"set:third", options))
    assert sum(map(len, parts)) == 3 * 1000
    assert max(map(len, parts)) == LOOKUPS_PER_STEP
