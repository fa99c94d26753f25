"""Reads of the upstream that the proxy answers itself for a time, by rules with `cache`."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from random import Random
from threading import Event
from time import sleep

import pytest

from compat.conformance.wire import Connection, Reply, request
from compat.waiting import eventually
from tests.meanwhile import meanwhile
from tests.server.overlay import Overlay

TIMED = """
[[rule]]
name = "pages"
keys = "page:<n>"
owner = "upstream"
cache = "10m"
"""
# Keys that are cached exactly until they change.
RULES = f"""{TIMED}
[[rule]]
keys = "exact:<n>"
owner = "upstream"
cache = "tracking"
"""


@pytest.fixture
def direct(overlay: Overlay) -> Iterator[Connection]:
    eventually(lambda: overlay.info()["upstream_key_changes"] == "on")
    with overlay.upstream.connect() as connection:
        connection.call("MSET", "page:1", "one", "page:2", "two", "other", "mine")
        connection.call("DEL", "page:hash", "page:list")
        connection.call("HSET", "page:hash", "f", "v")
        yield connection


@pytest.fixture
def client(overlay: Overlay, direct: Connection) -> Iterator[Connection]:
    with overlay.proxy.connect() as connection:
        # The upstream reports changes in their order: the proxy has got those of the fixture, too.
        number = connection.call("GET", "page:last").plain
        direct.call("INCR", "page:last")
        eventually(lambda: connection.call("GET", "page:last").plain != number)
        forget(connection)
        yield connection


def forget(client: Connection) -> None:
    """Have the proxy forget all that it has cached."""
    assert client.call("STATE", "RELOAD").plain >= 1


def hits(overlay: Overlay) -> int:
    return int(overlay.info()["cache_hits"])


@pytest.mark.parametrize("protocol", [2, 3])
def test_cache_answers_repeated_read_without_upstream(overlay: Overlay, client: Connection, protocol: int) -> None:
    client.call("HELLO", protocol)
    lines = [["GET", "page:1"], ["HGETALL", "page:hash"], ["hget", "page:hash", "f"], ["EXISTS", "page:none"]]
    lines += [["MGET", "page:1", "page:2", "page:none", "page:1"], ["EXISTS", "page:none", "page:1"]]
    found = [client.call(*line).raw for line in lines]
    before = hits(overlay)
    overlay.signal_upstream(signal.SIGSTOP)
    try:
        client.send(b"".join(request(*line) for line in (*lines, ["GET", "job:speed:1"], *lines)))
        assert [client.read().raw for _ in lines] == found
        assert client.read().plain == b"10"
        assert [client.read().raw for _ in lines] == found
    finally:
        overlay.signal_upstream(signal.SIGCONT)
    assert hits(overlay) == before + 12
    assert int(overlay.info()["cache_entries"]) == 6 and 0 < int(overlay.info()["cache_bytes"]) < 10_000


@pytest.mark.parametrize("protocol", [2, 3])
def test_cached_replies_keep_order_of_requests(overlay: Overlay, client: Connection, protocol: int) -> None:
    client.call("HELLO", protocol)
    lines = [["GET", "page:1"], ["GET", "page:none"], ["MGET", "page:1", "page:2"]]  # they are cached
    others = [["GET", "other"], ["GET", "job:speed:1"], ["PING"], ["SET", "other", "mine"], ["SET", "page:3", "three"]]
    replies = [client.call(*line).raw for line in (*lines, *others)]
    before, chosen = hits(overlay), Random(protocol)
    # Cached replies only, many of them, and also others between them.
    drawn = [chosen.randrange(len(lines)) for _ in range(3000)]
    drawn += [chosen.randrange(len(lines) if chosen.random() < 0.9 else len(replies)) for _ in range(3000)]
    data = b"".join(request(*(lines + others)[each]) for each in drawn)
    while data:
        size = chosen.randrange(1, 30_000)
        client.send(data[:size])
        data = data[size:]
    assert [client.read().raw for _ in drawn] == [replies[each] for each in drawn]
    assert hits(overlay) == before + sum(each < len(lines) for each in drawn)


def test_cached_reply_of_keys_ends_when_one_changes(overlay: Overlay, client: Connection, direct: Connection) -> None:
    for prefix in ("page", "exact"):
        both = [f"{prefix}:1", f"{prefix}:2"]
        direct.call("MSET", both[0], "one", both[1], "two")
        eventually(lambda both=both: client.call("MGET", *both).plain == [b"one", b"two"])  # type: ignore[misc]
        client.call("MGET", *both)
        before = hits(overlay)
        assert client.call("MGET", *both).plain == [b"one", b"two"] and hits(overlay) == before + 1
        assert client.call("SET", both[1], "own").plain == b"OK"
        assert client.call("MGET", *both).plain == [b"one", b"own"] and hits(overlay) == before + 1
        direct.call("SET", both[0], "direct")
        eventually(lambda both=both: client.call("MGET", *both).plain == [b"direct", b"own"])  # type: ignore[misc]


def test_cache_has_only_reads_of_its_rules_keys(overlay: Overlay, client: Connection) -> None:
    lines = [["GET", "other"], ["MGET", "page:1", "other"], ["TTL", "page:1"], ["SRANDMEMBER", "page:x"]]
    lines += [["LRANGE", "page:1", 0, 1], ["SORT_RO", "page:x"], ["EVAL_RO", "return 1", 1, "page:1"]]  # type: ignore[list-item]
    before = hits(overlay)
    for line in lines * 2:
        client.call(*line)
    client.send((request("MULTI") + request("GET", "page:2") + request("EXEC")) * 2)
    assert [client.read().plain for _ in range(6)][-1] == [b"two"]
    assert hits(overlay) == before and overlay.info()["cache_entries"] == "0"


@pytest.mark.parametrize(
    "write",
    [
        [["SET", "page:1", "new"]],
        [["DEL", "other", "page:1"]],
        [["EVAL", "return redis.call('set', KEYS[1], 'new')", "1", "page:1"]],
        [["EVAL", "return redis.call('set', 'page:1', 'new')", "0"]],
        [["MULTI"], ["APPEND", "page:1", "x"], ["EXEC"]],
        [["WATCH", "page:2"], ["MULTI"], ["SET", "page:1", "new"], ["EXEC"]],
        [["RENAME", "other", "page:1"]],
        [["FLUSHDB"]],
        [["BLMOVE", "page:list", "page:1", "LEFT", "LEFT", "0.01"]],
        [["SELECT", "1"], ["SET", "page:1", "x"], ["SELECT", "0"]],
    ],
    ids=lambda lines: " ".join(lines[0][:1] + lines[-1][:1]),
)
def test_write_ends_cached_reply_before_later_reads_of_its_client(
    overlay: Overlay, client: Connection, direct: Connection, write: list[list[str]]
) -> None:
    assert client.call("GET", "page:1").plain == client.call("GET", "page:1").plain == b"one"
    client.send(b"".join(request(*line) for line in [*write, ["GET", "page:1"], ["GET", "page:1"]]))
    replies = [client.read() for _ in range(len(write) + 2)]
    assert replies[-1].plain == replies[-2].plain == direct.call("GET", "page:1").plain


def test_cache_never_answers_older_value_than_own_write(overlay: Overlay, client: Connection) -> None:
    def read(is_over: Event) -> None:
        with overlay.proxy.connect() as reader:
            while not is_over.is_set():
                reader.call_each(*["GET page:2"] * 20)

    with meanwhile(read, read):
        for number in range(500):
            if number % 2:
                client.call("SET", "page:2", number)
                assert client.call("GET", "page:2").plain == b"%d" % number
            else:
                assert client.call_each(f"SET page:2 {number}", "GET page:2") == [b"OK", b"%d" % number]


def test_change_at_upstream_ends_cached_reply(overlay: Overlay, client: Connection, direct: Connection) -> None:
    assert client.call("GET", "page:1").plain == b"one"
    direct.call("SET", "page:1", "changed")
    eventually(lambda: client.call("GET", "page:1").plain == b"changed")
    direct.call("FLUSHALL")
    eventually(lambda: client.call("GET", "page:1").plain is None)


def test_watching_and_tracking_clients_bypass_cache(overlay: Overlay, client: Connection, direct: Connection) -> None:
    client.call("GET", "page:1")
    with overlay.proxy.connect() as other:
        other.call("HELLO", 3)
        other.call("CLIENT", "TRACKING", "ON")
        before = hits(overlay)
        assert other.call("GET", "page:1").plain == b"one" and hits(overlay) == before
        direct.call("SET", "page:1", "2")
        assert other.read().plain == [b"invalidate", [b"page:1"]]
    client.call("WATCH", "other")
    before = hits(overlay)
    client.call("GET", "page:1"), client.call("GET", "page:1")
    assert hits(overlay) == before
    client.call("UNWATCH")


def test_cache_without_tracking_ends_by_time(overlay: Overlay, direct: Connection) -> None:
    direct.call("ACL", "SETUSER", "plain", "on", ">secret", "~*", "&*", "+@all", "-client|tracking")
    routes = overlay.folder / "timed.toml"
    routes.write_text(TIMED)
    proxy = overlay.start_at(f"redis://plain:secret@127.0.0.1:{overlay.upstream.port}", "--routes", str(routes))
    with proxy.connect() as client:
        eventually(lambda: client.call("GET", "page:1").plain == b"one")
        eventually(lambda: "NOPERM" in overlay.info(proxy)["upstream_key_changes"])
        assert client.call("GET", "page:1").plain == b"one"
        direct.call("SET", "page:1", "not seen")
        assert client.call("GET", "page:1").plain == b"one"
        assert client.call("SET", "page:1", "own").plain == b"OK" and client.call("GET", "page:1").plain == b"own"
        client.send(b"MULTI\r\nSET page:1 again\r\nGET job:speed:1\r\nEXEC\r\nGET page:1\r\n")
        assert [client.read().plain for _ in range(5)][3:] == [[b"OK", b"10"], b"again"]
        routes.write_text(RULES)
        refused = client.call("STATE", "RELOAD").plain
        assert b"the rule 'exact:<n>' has cache = 'tracking', which needs CLIENT TRACKING at the upstream" in refused
        assert b"NOPERM" in refused and overlay.info(proxy)["ownership_rules"] == "1"
    url = f"redis://plain:secret@127.0.0.1:{overlay.upstream.port}"
    words = ("--cluster", str(overlay.topology), "--ownership", str(overlay.folder / "none.json"), "--upstream", url)
    line = [sys.executable, "-m", "resp_server.programs.proxy", *words, "--routes", str(routes), "--port", "0"]
    done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "timed.toml has 1 mistake: the rule 'exact:<n>' has cache" in done.stderr


@pytest.mark.parametrize("protocol", [2, 3])
def test_exact_cache_ends_with_change(overlay: Overlay, client: Connection, direct: Connection, protocol: int) -> None:
    client.call("HELLO", protocol)
    direct.call("SET", "exact:1", "one")
    assert [client.call("GET", "exact:1").plain for _ in range(2)] == [b"one"] * 2
    before = hits(overlay)
    assert client.call("GET", "exact:1").plain == b"one" and hits(overlay) == before + 1
    direct.call("SET", "exact:1", "two")
    eventually(lambda: client.call("GET", "exact:1").plain == b"two")
    assert client.call_each("SET exact:1 own", "GET exact:1", "GET exact:1") == [b"OK", b"own", b"own"]


READS = [["GET", "exact:2"], ["GETRANGE", "exact:2", "0", "-1"], ["MGET", "exact:2", "other"], ["TTL", "exact:2"]]
READS += [["EVAL_RO", "return redis.call('get', KEYS[1])", "1", "exact:2"], ["MGET", "job:speed:1", "exact:2"]]
READS += [["MGET", "exact:4", "exact:2"], ["MULTI"], ["GET", "exact:2"], ["EXEC"], ["GET", "exact:2"]]


def numbers_in(reply: Reply) -> list[int]:
    """Return the values of the key that a reply has, which are more than a thousand."""
    values = reply.plain if isinstance(reply.plain, list) else [reply.plain]
    return [int(each) for each in values if isinstance(each, bytes) and each.isdigit() and int(each) > 1000]


def test_exact_cache_never_answers_older_value_after_newer_one(overlay: Overlay, direct: Connection) -> None:
    """Values grow, by a client of the upstream. Clients of the proxy read them by all kinds of reads."""
    before = hits(overlay)

    def read(seed: int, is_over: Event) -> None:
        chosen, last = Random(seed), 0
        with overlay.proxy.connect() as reader:
            while not is_over.is_set():
                start = chosen.randrange(len(READS) - 3)
                lines = [*READS[start:], ["GET", "exact:2"], *READS[:3]] if start < 7 else READS[10:]
                reader.send(b"".join(request(*line) for line in lines))
                seen = [number for _ in lines for number in numbers_in(reader.read())]
                assert [last, *seen] == sorted([last, *seen])
                last = seen[-1]

    direct.call("SET", "exact:2", "1001")
    with meanwhile(*(partial(read, seed) for seed in range(3))):
        for number in range(400):
            direct.call("SET", "exact:2", 1002 + number)
            sleep(number % 4 / 1000)  # else nothing stays cached until it is read again
        eventually(lambda: hits(overlay) > before)


def test_exact_cache_needs_reports_of_changes(overlay: Overlay, client: Connection, direct: Connection) -> None:
    direct.call("SET", "exact:3", "one")
    assert client.call("GET", "exact:3").plain == client.call("GET", "exact:3").plain == b"one"
    for line in direct.call("CLIENT", "LIST").plain.decode().splitlines():
        if "flags=tB" in line or "flags=Bt" in line:
            direct.call("CLIENT", "KILL", "ID", line.split(" ")[0].removeprefix("id="))
    eventually(lambda: client.call("GET", "exact:3").plain == b"one" and overlay.info()["upstream_key_changes"] == "on")
    direct.call("SET", "exact:3", "two")
    eventually(lambda: client.call("GET", "exact:3").plain == b"two")


def test_lost_upstream_ends_cached_replies(overlay: Overlay, client: Connection) -> None:
    assert client.call("GET", "page:1").plain == b"one"
    overlay.signal_upstream(signal.SIGKILL)
    eventually(lambda: client.call("GET", "page:1").is_error)
    overlay.start_upstream()
    eventually(lambda: client.call("GET", "page:1").plain is None)
    eventually(lambda: overlay.info()["upstream_key_changes"] == "on")
