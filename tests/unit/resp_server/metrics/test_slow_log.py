"""SLOWLOG and LATENCY: slow requests and events within their limits, without passwords; histograms of all requests."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from resp_server.command.policies import policy_of
from resp_server.command.redaction import redacted
from resp_server.metrics.latency import SAMPLES_MAX, LatencyEvents, LatencyTimeSeries
from resp_server.metrics.slow_log import SlowLog, truncated
from resp_server.metrics.stats import CommandStats, Stats

GET = [b"GET", b"job:temp:1"]


def test_slow_log_without_threshold_has_all_requests_newest_first(connect: Callable[..., Any]) -> None:
    client = connect(slowlog_log_slower_than=0)
    client.session.set_observed(client.server.observation.is_on)
    client.send_buffer(GET, [b"MGET", b"job:temp:1", b"job:temp:2"], [b"HGETALL", b"job:visits:/"])
    words = [entry.arguments for entry in client.server.observation.slow_requests.log.newest(10)]
    assert words == [[b"HGETALL", b"job:visits:/"], [b"MGET", b"job:temp:1", b"job:temp:2"], GET]
    assert [entry.id for entry in client.server.observation.slow_requests.log.newest(10)] == [2, 1, 0]


def test_no_request_is_in_slow_log_that_was_fast_enough(connect: Callable[..., Any]) -> None:
    client = connect(slowlog_log_slower_than=3_600_000_000)
    client.send_buffer(GET, [b"PING"], [b"HGETALL", b"job:visits:/"])
    assert client.ask("SLOWLOG LEN") == b":0\r\n"


def test_below_a_millisecond_each_request_is_timed_by_itself(connect: Callable[..., Any]) -> None:
    client = connect(slowlog_log_slower_than=-1)
    assert client.session.can_use_fast_path
    assert client.ask("CONFIG SET slowlog-log-slower-than 999") == b"+OK\r\n"
    assert not client.session.can_use_fast_path
    assert client.ask("CONFIG SET slowlog-log-slower-than 1000") == b"+OK\r\n"
    assert client.session.can_use_fast_path


def test_slow_log_entry_has_time_client_and_duration(connect: Callable[..., Any]) -> None:
    client = connect(slowlog_log_slower_than=0)
    client.session.set_observed(True)
    client.ask("CLIENT SETNAME me")
    client.send(GET)
    entry = client.server.observation.slow_requests.log.newest(1)[0]
    head = b"*1\r\n*6\r\n:1\r\n:1700000000\r\n:%d\r\n" % entry.microseconds
    rest = b"*2\r\n$3\r\nGET\r\n$10\r\njob:temp:1\r\n$14\r\n127.0.0.1:5000\r\n$2\r\nme\r\n"
    assert client.ask("SLOWLOG GET 1") == head + rest


def test_reply_in_steps_is_timed_to_its_end(connect: Callable[..., Any]) -> None:
    client = connect(slowlog_log_slower_than=0)
    client.session.set_observed(True)
    steps: list[int] = []
    encoder_ns = client.server.stats.command_stats("keys")
    client.send([b"KEYS", b"*"])
    steps.append(encoder_ns.calls)
    (entry,) = client.server.observation.slow_requests.log.newest(1)
    assert entry.arguments == [b"KEYS", b"*"]
    assert sum(encoder_ns.took) == encoder_ns.calls == 1
    assert entry.microseconds == encoder_ns.nanoseconds // 1000


@pytest.mark.parametrize(
    ("name", "words", "shown"),
    [
        ("auth", b"AUTH secret", b"AUTH (redacted)"),
        ("auth", b"AUTH me secret", b"AUTH (redacted) (redacted)"),
        ("hello", b"HELLO 3 AUTH me secret SETNAME x", b"HELLO 3 AUTH (redacted) (redacted) SETNAME x"),
        ("acl|setuser", b"ACL SETUSER me on >secret", b"ACL SETUSER (redacted) (redacted) (redacted)"),
        ("config|set", b"CONFIG SET timeout 3 requirepass x", b"CONFIG SET timeout 3 requirepass (redacted)"),
        ("get", b"GET auth", b"GET auth"),
    ],
)
def test_slow_log_hides_passwords(name: str, words: bytes, shown: bytes) -> None:
    assert list(redacted(policy_of(name).redaction, words.split())) == shown.split()


def test_long_request_is_kept_in_part() -> None:
    assert truncated([b"x" * 200]) == [b"x" * 128 + b"... (72 more bytes)"]
    assert truncated([b"a"] * 40) == [b"a"] * 31 + [b"... (9 more arguments)"]
    assert truncated([b"a"] * 32) == [b"a"] * 32


def test_slow_log_keeps_newest() -> None:
    slow = SlowLog()
    slow.set_id_sequence(3, 10)
    for number in range(5):
        slow.add(number, number, [b"x"], "a:1", b"", 2)
    assert [entry.id for entry in slow.newest(9)] == [43, 33]
    slow.cut(1)
    assert [entry.id for entry in slow.newest(9)] == [43]
    slow.clear()
    assert len(slow) == 0


def test_slow_logs_of_several_processes_are_one(connect: Callable[..., Any]) -> None:
    client = connect(slowlog_log_slower_than=-1, slowlog_max_len=2)
    client.server.observation.slow_requests.log.add(5_000, 7, [b"A"], "a:1", b"", 2)
    other = [[9, 6_000, 8, ["B"], "b:2", ""], [8, 4_000, 8, ["C"], "b:2", ""]]
    client.server.workers = SimpleNamespace(query=lambda name, argument, then: then([other]))
    pending = client.pipeline.reply_to(client.call, [b"SLOWLOG", b"GET"])
    assert [row[0] for row in pending.make()] == [9, 0]


def test_event_has_its_longest_time_of_each_second() -> None:
    event = LatencyTimeSeries()
    for second, milliseconds in [(1, 5), (1, 3), (2, 9), (2, 12)]:
        event.add(second, milliseconds)
    assert (list(event.samples), event.max_ms) == ([(1, 5), (2, 12)], 12)
    for second in range(1000):
        event.add(10 + second, 1)
    assert len(event.samples) == SAMPLES_MAX


def test_events_of_several_processes_are_joined_second_by_second() -> None:
    first, second = LatencyEvents(), LatencyEvents()
    first.add("command", 1_000, 5)
    first.add("command", 3_000, 6)
    second.add("command", 1_500, 9)
    second.add("event-loop", 2_000, 4)
    joined = LatencyEvents.merged([first.to_json(), second.to_json()])
    assert {name: (list(each.samples), each.max_ms) for name, each in joined.by_name.items()} == {
        "command": ([(1, 9), (3, 6)], 9),
        "event-loop": ([(2, 4)], 4),
    }


def test_latency_commands_show_events(connect: Callable[..., Any]) -> None:
    # Minutes: the test's own requests are no events, however long they take.
    client = connect(latency_monitor_threshold=500_000)
    server = client.server
    for name, now_ms, milliseconds in [
        ("command", -3_000, 800_000),
        ("command", 0, 2_000_000),
        ("command", 0, 300_000),
        ("fast", 0, 500_000),
    ]:
        server.clock = lambda now_ms=now_ms: 1_700_000_000_000 + now_ms
        server.observation.slow_requests.record_event(name, milliseconds)
    assert client.ask("LATENCY LATEST") == (
        b"*2\r\n*4\r\n$7\r\ncommand\r\n:1700000000\r\n:2000000\r\n:2000000\r\n*4\r\n$4\r\nfast\r\n:1700000000\r\n:500000\r\n:500000\r\n"
    )
    assert (
        client.ask("LATENCY HISTORY command")
        == b"*2\r\n*2\r\n:1699999997\r\n:800000\r\n*2\r\n:1700000000\r\n:2000000\r\n"
    )
    assert client.ask("LATENCY HISTORY nope") == b"*0\r\n"
    assert b"command: 2 latency spikes (average 1400000ms, mean deviation 600000ms" in client.ask("LATENCY DOCTOR")
    assert client.ask("LATENCY GRAPH nope") == b"-ERR No samples available for event 'nope'\r\n"
    assert client.ask("LATENCY RESET nope fast") == b":1\r\n"
    assert client.ask("LATENCY RESET") == b":1\r\n"
    assert client.ask("LATENCY LATEST") == b"*0\r\n"


def test_graph_is_drawn_as_redis_draws_it(connect: Callable[..., Any]) -> None:
    client = connect(latency_monitor_threshold=1)
    for age_s, milliseconds in [(90, 10), (5, 100), (3, 55), (0, 500)]:
        client.server.clock = lambda age_s=age_s: 1_700_000_000_000 - age_s * 1000
        client.server.observation.slow_requests.record_event("command", milliseconds)
    text = client.ask("LATENCY GRAPH command").partition(b"\r\n")[2].decode()
    assert text == (
        "command - high 500 ms, low 10 ms (all time high 500 ms)\n"
        + "-" * 80
        + "\n   #\n   |\n   |\n_#o|\n    \n1530\nmsss\n\r\n"
    )


def test_histogram_has_steps_of_redis() -> None:
    command_stats = CommandStats()
    for nanoseconds in (1, 1_000, 1_024, 5_000, 40_000, 40_001, 2_000_000):
        command_stats.count(1, nanoseconds)
    stats = Stats(commands={"get": command_stats})
    asked = SimpleNamespace(to_json=stats.to_json)
    rebuilt = Stats.from_json(asked.to_json()).commands["get"]
    from resp_server.commands.latency import histogram

    assert histogram(rebuilt) == {b"calls": 7, b"histogram_usec": {1: 2, 2: 3, 8: 4, 66: 6, 2113: 7}}


def test_calls_that_were_answered_together_count_with_their_mean() -> None:
    command_stats = CommandStats()
    command_stats.count(100, 400_000)
    assert command_stats.took[(4_000).bit_length()] == command_stats.calls == 100


def test_requests_after_resetstat_count_again(connect: Callable[..., Any]) -> None:
    client = connect()
    client.send_buffer(GET, GET)
    assert client.ask("CONFIG RESETSTAT") == b"+OK\r\n"
    assert (client.server.stats.hits, client.server.stats.command_stats("get").calls) == (0, 0)
    client.send_buffer(GET)
    assert (client.server.stats.hits, client.server.stats.command_stats("get").calls) == (1, 1)
    assert b"cmdstat_get:calls=1," in client.ask("INFO commandstats")
