"""The order of checks, the fast path against the general one, and errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from resp_server.commands.string import KEYS_PER_READ
from resp_server.pipeline.long_requests import UNSPLIT_BYTES_MAX
from resp_server.protocol.replies import Sliced
from resp_server.protocol.request_parser import LongRequest
from resp_server.session.session import ReplyMode

ARITY = b"-ERR wrong number of arguments for 'get' command\r\n"
NOAUTH = b"-NOAUTH Authentication required.\r\n"
READONLY = b"-READONLY You can't write against a read only replica.\r\n"
WRONGTYPE = b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n"


def test_unknown_command_is_reported_before_noauth(connect: Callable[..., Any]) -> None:
    client = connect(password="x")
    assert client.ask("foo a").startswith(b"-ERR unknown command 'foo'")
    assert client.ask("client foo").startswith(b"-ERR unknown subcommand 'foo'")


def test_arity_is_checked_before_login(connect: Callable[..., Any]) -> None:
    client = connect(password="x")
    assert client.ask("get") == ARITY
    assert client.ask("get a") == NOAUTH
    assert client.ask("client id") == NOAUTH


def test_login_is_required_before_write_is_refused(connect: Callable[..., Any]) -> None:
    client = connect(password="x")
    assert client.ask("set a") == b"-ERR wrong number of arguments for 'set' command\r\n"
    assert client.ask("set a b") == NOAUTH
    assert client.ask("auth x") == b"+OK\r\n"
    assert client.ask("set a b") == READONLY
    assert client.ask("setex a 0 x") == READONLY


def test_greeting_commands_need_no_password(connect: Callable[..., Any]) -> None:
    client = connect(password="x")
    assert client.ask("reset") == b"+RESET\r\n"
    assert client.ask("hello 3 auth default x").startswith(b"%8")
    assert client.ask("reset") == b"+RESET\r\n"
    assert client.ask("ping") == NOAUTH
    assert client.ask("quit") == b"+OK\r\n"


REQUESTS = [
    "GET job:temp:1",
    "get job:temp:nope",
    "GeT job:stats:a",
    "GET",
    "GET a b",
    "GET other:key",
    "TTL job:temp:soon",
    "HGETALL job:stats:a",
    "HGET job:temp:1 f",
    "HGET a",
    "HGET job:stats:a low",
    "hget job:stats:a nope",
    "HGET job:visits:ttl on",
    "HGET job:visits:/ u7",
    "LRANGE job:news:a 0 -1",
    "lrange job:news:a 1 2",
    "LRANGE job:news:a 9 12",
    "LRANGE job:news:a 01 2",
    "LRANGE job:news:nope 0 -1",
    "LRANGE job:news:nope 0 x",
    "LRANGE job:news:long 0 9",
    "LRANGE job:temp:1 0 -1",
    "MGET job:temp:1 job:temp:soon job:temp:gone x job:temp:1",
    "mget job:temp:1 $ * $1",
    "MGET",
    "MGET job:temp:1 job:stats:a x",
    "EXISTS job:temp:1 job:temp:1 x",
    "GETRANGE job:temp:1 a b",
    "HGETALL job:visits:/",
    "SET a b",
]


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("line", REQUESTS)
def test_run_of_requests_is_answered_as_each_by_itself(connect: Callable[..., Any], line: str, protocol: int) -> None:
    request = [word.encode() for word in line.split()]
    run, general = connect(), connect()
    run.session.protocol = general.session.protocol = protocol
    assert run.send(request, request) == general.general(request) * 2
    general.general(request)
    assert_same_counts(run, general)


COLUMNS = [
    "GET job:temp:1 job:temp:nope job:temp:2 other:key job:temp:soon job:temp:gone job:temp:1",
    "get job:temp:1 job:stats:a job:temp:2",
    "TTL job:temp:soon job:temp:1 x",
    "HGETALL job:stats:a job:stats:a job:stats:nope job:visits:ttl",
    "HGETALL job:stats:a job:temp:1 job:stats:a",
    "hgetall job:visits:/",
    "PING a b",
    "NOPE a b",
]


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("line", COLUMNS)
def test_equal_requests_are_answered_as_by_general_path(connect: Callable[..., Any], line: str, protocol: int) -> None:
    name, *seconds = (word.encode() for word in line.split())
    requests = [[name, second] for second in seconds]
    run, general = connect(), connect()
    run.session.protocol = general.session.protocol = protocol
    assert run.send(*requests) == b"".join(map(general.general, requests))
    assert_same_counts(run, general)


def test_connection_that_is_not_plain_is_answered_request_by_request(client: Any) -> None:
    client.ask("CLIENT REPLY OFF")
    assert client.send([b"GET", b"job:temp:1"], [b"GET", b"job:temp:2"]) == b""
    client.ask("CLIENT REPLY ON")
    client.ask("SELECT 1")
    assert client.send([b"GET", b"job:temp:1"], [b"GET", b"job:temp:2"]) == b"$-1\r\n" * 2


def assert_same_counts(run: Any, general: Any) -> None:
    stats, expected = run.server.stats, general.server.stats
    assert (stats.hits, stats.misses, stats.errors) == (expected.hits, expected.misses, expected.errors)
    tallies, others = (
        {
            name: (each.calls, each.rejected, each.failed)
            for name, each in one.commands.items()
            if each.calls or each.rejected
        }
        for one in (stats, expected)
    )
    assert tallies == others
    assert run.session.last_command == general.session.last_command


def test_runs_of_commands_are_answered_in_order(client: Any) -> None:
    lines = ["GET job:temp:1", "GET job:temp:2", "PING", "TTL x", "GET job:temp:3", "FOO", "SET a b"]
    together = client.send(*[[word.encode() for word in line.split()] for line in lines])
    assert together == b"".join(client.ask(line) for line in lines)


def test_batched_requests_are_answered_and_counted_like_single_ones(client: Any) -> None:
    lines = ["GET job:temp:1", "GET x", "GET job:visits:/", "GET job:temp:2", "GET", "GET job:temp:1", "GET job:temp:2"]
    stats, tally = client.server.stats, client.server.stats.command_stats("get")

    def counted() -> list[int]:
        return [stats.hits, stats.misses, tally.calls, tally.rejected, tally.failed, sum(tally.took)]

    expected = b"".join(client.ask(line) for line in lines)
    by_themselves = counted()
    stats.reset()
    assert client.send(*[[word.encode() for word in line.split()] for line in lines]) == expected
    assert counted() == by_themselves
    stats.reset()
    alike = [line for line in lines if line != "GET"]
    together = client.send(*[[word.encode() for word in line.split()] for line in alike])
    assert together == b"".join(client.ask(line) for line in alike)


def test_long_request_is_not_answered_together_with_others(client: Any) -> None:
    short, long = [b"GET", b"job:temp:1"], LongRequest([b"GET", b"job:temp:2"], UNSPLIT_BYTES_MAX + 1)
    each = [client.send(short), client.send(long), client.send(short)]
    assert each[1].startswith(b"-ERR 'get' takes ")
    assert client.send(short, long, short) == b"".join(each)


def test_keys_of_mget_are_looked_up_together_for_all_kinds(client: Any) -> None:
    keys = [b"job:temp:%d" % (number % 25) for number in range(KEYS_PER_READ * 2 + 5)]
    for at in (0, 7, KEYS_PER_READ - 1, KEYS_PER_READ, len(keys) - 1):
        keys[at] = b"job:stats:a"
    values = [b"$-1\r\n" if key == b"job:stats:a" else client.send([b"GET", key]) for key in keys]
    assert client.send([b"MGET", *keys]) == b"*%d\r\n" % len(keys) + b"".join(values)


def test_slow_batch_is_one_slowlog_entry(client: Any) -> None:
    client.server.observation.slow_ns = 0
    client.server.config = replace(client.server.config, slowlog_log_slower_than=0)
    client.send(*[[b"GET", b"job:temp:%d" % number] for number in range(3)])
    assert [each.arguments for each in client.server.observation.slow_requests.log.newest(9)] == [
        [b"GET", b"job:temp:0", b"... (2 more requests)"]
    ]


def test_requests_after_reply_in_steps_are_kept(client: Any) -> None:
    keys = [b"job:temp:%d" % i for i in range(20)] * 50
    waiting = [[b"PING"], [b"MGET", *keys], [b"MGET", b"job:temp:1"], [b"PING"]]
    out: list[bytes] = []
    assert isinstance(client.pipeline.answer(client.call, waiting, out), Sliced)
    assert out == [b"+PONG\r\n"]
    assert waiting == [[b"MGET", b"job:temp:1"], [b"PING"]]


@pytest.mark.parametrize("name", [b"ECHO", b"GETRANGE"])
def test_large_reply_ends_batch_and_loses_nothing(client: Any, monkeypatch: pytest.MonkeyPatch, name: bytes) -> None:
    request = [name, b"job:temp:soon", b"0", b"-1"] if name == b"GETRANGE" else [name, b"job:temp:soon"]
    reply = client.send(request)
    for limit_bytes in range(len(reply) - 3, len(reply) + 3):
        monkeypatch.setattr("resp_server.pipeline.immediate.LARGE_REPLY_BYTES", limit_bytes)
        waiting = [request, request, request, [b"PING"]]
        out: list[bytes] = []
        client.pipeline.answer(client.call, waiting, out)
        assert out == ([reply] * 3 + [b"+PONG\r\n"] if len(reply) <= limit_bytes else [reply])
        assert len(out) + len(waiting) == 4


def test_nothing_is_answered_after_quit(client: Any) -> None:
    assert client.send([b"PING"], [b"QUIT"], [b"PING"]) == b"+PONG\r\n+OK\r\n"
    assert client.session.is_closing


def test_http_request_of_browser_is_closed_without_reply(client: Any) -> None:
    assert client.send([b"POST", b"/", b"HTTP/1.1"], [b"GET", b"a"]) == b""
    assert client.session.is_closing


def test_silent_connection_gets_no_reply(client: Any) -> None:
    assert client.send([b"CLIENT", b"REPLY", b"OFF"], [b"PING"], [b"GET", b"a"], [b"KEYS", b"*"], [b"FOO"]) == b""
    assert client.ask("CLIENT REPLY ON") == b"+OK\r\n"
    assert client.send([b"CLIENT", b"REPLY", b"SKIP"], [b"PING"], [b"ECHO", b"a"]) == b"$1\r\na\r\n"
    assert client.session.reply_mode is ReplyMode.ON


def test_another_database_is_empty(client: Any) -> None:
    assert client.ask("SELECT 1") == b"+OK\r\n"
    assert client.ask("GET job:temp:1") == b"$-1\r\n"
    assert client.ask("DBSIZE") == b":0\r\n"
    assert client.ask("KEYS *") == b"*0\r\n"
    assert client.ask("SELECT 0") == b"+OK\r\n"
    assert client.ask("GET job:temp:1") == b"$1\r\n1\r\n"


def test_bug_is_answered_with_id_that_log_has(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    client.server.view.at = lambda key: 1 / 0
    for request in ([b"GET", b"a"], [b"TTL", b"a"], [b"STATE", b"LOCATE", b"a"]):
        reply = client.send(request)
        assert reply.startswith(b"-ERR internal error ")
        assert reply.split()[-1].decode() in caplog.text
    assert "ZeroDivisionError" in caplog.text
    assert client.ask("PING") == b"+PONG\r\n"


def test_remembered_spellings_are_bounded(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resp_server.command.spellings.SPELLINGS_MAX", 3)
    for name in (b"GET", b"get", b"Get", b"gET", b"GEt"):
        assert client.send([name, b"job:temp:1"]) == b"$1\r\n1\r\n"
    assert len(client.pipeline._key_commands) == 3


def test_errors_and_calls_are_counted(client: Any) -> None:
    for line in ("GET job:temp:1", "GET job:stats:a", "GET", "SET a b", "FOO", "GET x"):
        client.ask(line)
    stats = client.server.stats
    assert stats.errors == {"WRONGTYPE": 1, "ERR": 2, "READONLY": 1}
    get = stats.commands["get"]
    assert (get.calls, get.failed, get.rejected) == (3, 1, 1)
    assert (stats.hits, stats.misses) == (1, 1)
    assert stats.commands["set"].rejected == 1


def test_no_key_is_answered_while_jobs_are_opened(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resp_server.pipeline.loading_waits.WAITING_CLIENTS_MAX", 0)
    loading = b"-LOADING Redis is loading the dataset in memory\r\n"
    client.server.is_loading = True
    assert client.ask("GET job:temp:1") == loading
    assert client.send([b"GET", b"job:temp:1"], [b"GET", b"nope"]) == 2 * loading
    assert client.ask("DBSIZE") == loading
    assert client.ask("SET a b") == READONLY
    assert client.ask("CLIENT ID") == b":7\r\n"
    assert b"\r\nloading:1\r\n" in client.ask("INFO persistence")
    client.server.is_loading = False
    assert client.ask("GET job:temp:1") == b"$1\r\n1\r\n"
