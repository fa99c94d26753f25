"""SLOWLOG, LATENCY, MEMORY, MONITOR, CONFIG SET and the like: a server's own numbers, in Redis' shapes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from compat.conformance.pair import Pair
from compat.conformance.servers import Running
from compat.conformance.wire import Reply, Words

SAME = """
slowlog get -2|slowlog get x|slowlog get 1 2|slowlog len x|slowlog reset
latency latest|latency history nope|latency reset|latency reset nope|latency graph nope|latency histogram nope
latency doctor|latency history|latency graph a b
memory purge|memory malloc-stats x|memory stats x|memory doctor x
client pause x|client pause -1|client pause 0|client pause 0 all|client pause 0 maybe|client pause 0 all x
client unpause|client unblock x|client unblock 99999999|client unblock 99999999 error|client unblock 99999999 nope
client unblock 99999999 timeout x
config rewrite|config resetstat|config set|config set a|config set timeout 0 x|config set nope 1
config set daemonize yes|config set timeout x|config set timeout -1|config set TimeOut 1.5|config set maxclients 0
config set databases 3|config set slowlog-max-len -1|config set slowlog-log-slower-than -2
config set latency-monitor-threshold -1
config set timeout 1 timeout 2|config set daemonize yes nope 1|config set nope 1 daemonize yes
config set nope 1 timeout x|config set save  appendonly no|config set timeout 0 maxmemory 0|config set appendonly maybe
"""
DIFFERENT = {
    # Redis can, and this cannot: what it is already is taken, anything else is refused as what cannot change.
    "config set appendonly maybe": b"-ERR CONFIG SET failed (possibly related to argument 'appendonly') - can't set "
    b"immutable config\r\n",
}


@contextmanager
def measuring(server: Running) -> Iterator[Any]:
    """Have a server keep every request in its slow log, and connect to it."""
    with server.connect() as connection:
        for words in (("CONFIG", "SET", "slowlog-log-slower-than", "0"), ("SLOWLOG", "RESET")):
            assert connection.call(*words).value == b"OK"
        try:
            yield connection
        finally:
            connection.call("CONFIG", "SET", "slowlog-log-slower-than", "10000")


@pytest.mark.parametrize("line", [line for row in SAME.strip().splitlines() for line in row.split("|")])
def test_commands_with_one_possible_reply_equal_redis(pair: Pair, line: str) -> None:
    if line in DIFFERENT:
        assert [reply.raw for reply in pair.replies_to([[word.encode() for word in line.split()]])[1]] == [
            DIFFERENT[line]
        ]
    else:
        pair.check_line(line)


def test_changed_setting_is_shown_as_by_redis(pair: Pair) -> None:
    names = [b"timeout", b"maxclients", b"slowlog-log-slower-than", b"slowlog-max-len", b"latency-monitor-threshold"]
    before = dict(zip(names, [b"0", b"10000", b"10000", b"128", b"0"], strict=True))
    after = dict(zip(names, [b"300", b"9000", b"-1", b"7", b"25"], strict=True))
    for values in (after, before):
        pipeline: list[Words] = [[b"CONFIG", b"SET", *(word for pair in values.items() for word in pair)]]
        pair.check([*pipeline, [b"CONFIG", b"GET", *names]])
        pair.check([[b"HELLO", b"3"], [b"CONFIG", b"GET", *names]])


@pytest.mark.parametrize("protocol", [2, 3])
def test_entry_of_slow_log_has_redis_shape(pair: Pair, protocol: int) -> None:
    kept = []
    for server in (pair.redis, pair.sparkis):
        with measuring(server) as connection:
            connection.call("HELLO", str(protocol))
            connection.call("CLIENT", "SETNAME", "me")
            for words in (("GET", "plain"), ("MGET", *["x"] * 40), ("ECHO", "y" * 300), ("AUTH", "me", "secret")):
                connection.call(*words)
            kept.append(connection.call("SLOWLOG", "GET", "20"))
            assert connection.call("SLOWLOG", "LEN").value >= 5
    theirs, ours = kept
    assert {tuple(part.type for part in entry.value) for entry in ours.value} == {(":", ":", ":", "*", "$", "$")}
    assert [_words(each) for each in ours.value] == [_words(each) for each in theirs.value]
    assert _words(ours.value[0]) == [b"AUTH", b"(redacted)", b"(redacted)"]
    ids = [entry.value[0].value for entry in ours.value]
    assert ids == sorted(ids, reverse=True)


def _words(entry: Reply) -> list[bytes]:
    return [word.value for word in entry.value[3].value]


@pytest.mark.parametrize("greeting", [[], [[b"HELLO", b"3"]]])
def test_histogram_has_redis_shape_and_steps(pair: Pair, greeting: list[Words]) -> None:
    pipeline: list[Words] = [*greeting, *[[b"GET", b"plain"]] * 50, [b"LATENCY", b"HISTOGRAM", b"get", b"nope"]]
    theirs, ours = (replies[-1] for replies in pair.replies_to(pipeline))
    assert ours.type == theirs.type
    their_row, our_row = (_pairs(_pairs(reply)[b"get"]) for reply in (theirs, ours))
    assert list(our_row) == list(their_row) == [b"calls", b"histogram_usec"]
    steps = [int(step) for step in _pairs(our_row[b"histogram_usec"])]
    assert steps == sorted(steps)
    assert set(steps) <= {((1 << bits) * 129 // 128 - 1) // 1000 for bits in range(10, 40)}
    assert list(_pairs(our_row[b"histogram_usec"]).values())[-1].value == our_row[b"calls"].value >= 50


def _pairs(reply: Reply) -> dict[bytes, Reply]:
    if reply.type == "%":
        return {key.value: value for key, value in reply.value}
    flat = reply.value
    return {key.value: value for key, value in zip(flat[::2], flat[1::2], strict=True)}


def test_percentiles_have_redis_form(pair: Pair) -> None:
    form = rb"latency_percentiles_usec_get:p50=\d+\.\d{3},p99=\d+\.\d{3},p99\.9=\d+\.\d{3}\r\n"
    for replies in pair.replies_to([[b"GET", b"plain"], [b"INFO", b"latencystats"]]):
        assert re.search(form, replies[-1].value), replies[-1].value


NEW_IN_7_4 = {
    b"overhead.db.hashtable.lut",
    b"overhead.db.hashtable.rehashing",
    b"db.dict.rehashing.count",
    b"allocator.muzzy",
}


@pytest.mark.parametrize("greeting", [[], [[b"HELLO", b"3"]]])
def test_statistics_of_memory_have_redis_names_and_kinds(pair: Pair, greeting: list[Words]) -> None:
    theirs, ours = (replies[-1] for replies in pair.replies_to([*greeting, [b"MEMORY", b"STATS"]]))
    their_rows, our_rows = _pairs(theirs), _pairs(ours)
    assert ours.type == theirs.type
    assert our_rows.keys() - their_rows.keys() <= NEW_IN_7_4
    assert their_rows.keys() - our_rows.keys() == set()
    kinds = {name: (reply.type, their_rows[name].type) for name, reply in our_rows.items() if name in their_rows}
    assert all(mine == yours for mine, yours in kinds.values()), kinds
    assert [name for name in our_rows if name in their_rows] == [name for name in their_rows if name in our_rows]


def test_texts_for_people_are_texts_in_both_versions(pair: Pair) -> None:
    for words in ([b"MEMORY", b"DOCTOR"], [b"LATENCY", b"DOCTOR"], [b"LOLWUT"], [b"MEMORY", b"MALLOC-STATS"]):
        for greeting in ([], [[b"HELLO", b"3"]]):
            theirs, ours = (replies[-1] for replies in pair.replies_to([*greeting, words]))
            assert ours.type == theirs.type, words
    assert b"\nRedis ver. 7.4.0\n" in pair.replies_to([[b"LOLWUT", b"5"]])[1][0].value


def test_lines_of_monitor_equal_redis(pair: Pair) -> None:
    seen = []
    pipeline: list[Words] = [
        *([b"MULTI"], [b"get", b"plain"], [b"CLIENT", b"ID"], [b"EXEC"], [b"SELECT", b"3"], [b"GET", b"x"]),
        *([b"CONFIG", b"GET", b"save"], [b"AUTH", b"secret"], [b"HELLO", b"3", b"AUTH", b"default", b"secret"]),
        *([b"RESET"], [b"nope"], [b"GET"], [b"ECHO", b'a\x00"\\\n\xff b'], [b"HGETALL", b"hash:large"]),
        *([b"KEYS", b"nope*"], [b"PING", b"the end"]),
    ]
    for server in (pair.redis, pair.sparkis):
        with server.connect() as connection, server.connect() as other:
            assert connection.call("MONITOR").value == b"OK"
            for words in pipeline:
                other.call(*words)
            lines: list[bytes] = []
            while not lines or b"the end" not in lines[-1]:
                lines.append(connection.read().value)
            forms = [re.fullmatch(rb"\d+\.\d{6} \[(\d+) 127\.0\.0\.1:\d+\] (.*)", line, re.DOTALL) for line in lines]
            seen.append([form.groups() for form in forms if form])
            assert len(seen[-1]) == len(lines)
            assert connection.call("GET", "plain").raw == b"-ERR Replica can't interact with the keyspace\r\n"
    assert seen[1] == seen[0]


def test_last_save_is_a_time(pair: Pair) -> None:
    (theirs,), (ours,) = pair.replies_to([[b"LASTSAVE"]])
    assert ours.type == theirs.type == ":"
    assert ours.value > 0
