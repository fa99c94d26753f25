"""Clients' sockets, on the core's own epoll and on asyncio's: any chunks of input, slow readers, disconnects."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from time import sleep
from typing import Any

import pytest

from compat.waiting import eventually
from resp_server import native
from resp_server.client import connection
from resp_server.client.connection import Connection
from resp_server.settings.server import OUTPUT_LIMITS
from state_backend.lmdb.store import LmdbStore
from tests.server.conftest import OWN_SOCKETS
from tests.server.socket_requests import (
    GET_LARGE,
    KEYS,
    LARGE,
    PAIR,
    PAIR_REPLIES,
    PING,
    PONG,
    STATES,
    bulk,
    get,
    mixture,
    packed,
)


@pytest.fixture(params=[OWN_SOCKETS, "asyncio", "pure"])
def start(
    request: pytest.FixtureRequest, serve: Callable[..., Any], lmdb: LmdbStore, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Start servers: on the core's own epoll; the core behind asyncio; without the core."""
    if request.param == "pure":
        monkeypatch.setattr(native, "core", None)
    if request.param != "own":
        monkeypatch.setattr(native, "sockets", None)

    def started(**settings: Any) -> Any:
        made = serve(lmdb, STATES, **settings)
        assert (made.server._poller is not None) == (request.param == "own")
        return made

    return started


def test_requests_may_come_byte_by_byte(start: Callable[..., Any]) -> None:
    peer = start().connect()
    peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sent, expected = mixture(random.Random(1), 60)
    for byte in sent:
        peer.send(bytes([byte]))
    assert peer.read(len(expected)) == expected


@pytest.mark.parametrize("seed", range(3))
def test_replies_of_core_and_of_general_path_keep_their_order(start: Callable[..., Any], seed: int) -> None:
    dice = random.Random(seed)
    running = start()
    peers = [running.connect() for _ in range(4)]
    talks = [mixture(dice, 400) for _ in peers]
    left = [sent for sent, _ in talks]
    while any(left):
        at = dice.randrange(len(left))
        size = dice.choice((1, 7, 100, 3_000, 70_000))
        peers[at].send(left[at][:size])
        left[at] = left[at][size:]
    for peer, (_, expected) in zip(peers, talks, strict=True):
        assert peer.read(len(expected)) == expected


def test_pipelines_longer_than_one_read_are_answered_in_order(start: Callable[..., Any]) -> None:
    peer = start().connect()
    numbers = [at * 7 % KEYS for at in range(20_000)]  # 0.6 MB
    peer.expect_reply(b"".join(map(get, numbers)), b"".join(bulk(b"%d" % number) for number in numbers))


def test_long_replies_are_sent_in_parts_between_other_clients_requests(start: Callable[..., Any]) -> None:
    running = start()
    greedy, other = running.connect(), running.connect()
    count = 300  # 15 MB, from one read
    greedy.send(GET_LARGE * count + PING)
    other.expect_reply(get(5), bulk(b"5"))
    assert greedy.read(count * len(bulk(LARGE)) + len(PONG)) == bulk(LARGE) * count + PONG


def test_client_that_sends_all_before_it_reads_gets_all_replies(start: Callable[..., Any]) -> None:
    running = start()
    slow, other = running.connect(), running.connect()
    slow.send(PAIR * 1_000)  # it ends though nothing is read
    other.expect_reply(PING, PONG)
    assert running.call(lambda: max(each.output.size_bytes for each in running.server._connections.values())) < 8 << 20
    assert slow.read(1_000 * len(PAIR_REPLIES)) == PAIR_REPLIES * 1_000
    slow.expect_reply(PING, PONG)


def test_client_that_sends_more_than_it_reads_gets_all_replies(start: Callable[..., Any]) -> None:
    peer = start().connect()
    sending = Thread(target=lambda: [peer.send(PAIR * 20) for _ in range(50)])
    sending.start()
    for _ in range(100):
        assert peer.read(10 * len(PAIR_REPLIES)) == PAIR_REPLIES * 10
    sending.join()


def test_client_with_too_many_unread_replies_and_requests_is_not_read(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "AHEAD_BYTES_MAX", 2 << 20)
    running = start()
    if running.server._poller is not None:
        running.server._poller.ahead_bytes_max = 2 << 20
    slow, other = running.connect(), running.connect()
    slow.socket.setblocking(False)
    sent = quiet = 0
    while quiet < 20:  # nothing more of it is read
        before = sent
        with suppress(BlockingIOError):
            while sent < 60 << 20:
                sent += slow.socket.send(PAIR[sent % len(PAIR) :])
        other.expect_reply(PING, PONG)
        quiet = quiet + 1 if sent == before else 0
    assert sent < 60 << 20
    slow.socket.setblocking(True)
    got = slow.read(sent // len(PAIR) * len(PAIR_REPLIES))
    assert got == PAIR_REPLIES * (sent // len(PAIR))
    slow.expect_reply(PAIR[sent % len(PAIR) :], PAIR_REPLIES)


def test_requests_before_half_close_are_answered(start: Callable[..., Any]) -> None:
    running = start()
    for sent, expected in [
        (get(1) * 3, bulk(b"1") * 3),
        (get(1) + packed(b"ECHO", b"a"), bulk(b"1") + bulk(b"a")),
        (GET_LARGE * 200, bulk(LARGE) * 200),
        (PAIR * 500, PAIR_REPLIES * 500),
        (get(1) + get(2)[:-3], bulk(b"1")),
        (b"", b""),
    ]:
        peer = running.connect()
        peer.send(sent)
        peer.socket.shutdown(socket.SHUT_WR)
        assert peer.read_all() == expected
    eventually(lambda: running.call(lambda: not running.server._connections))


@pytest.mark.parametrize("data", [b"", PING, get(1)[:-2], GET_LARGE * 500, b"SUBSCRIBE a\r\n"])
def test_clients_that_reset_their_connections_are_gone_at_once(start: Callable[..., Any], data: bytes) -> None:
    running = start()
    stays = running.connect()
    stays.expect_reply(PING, PONG)
    for _ in range(20):
        peer = running.connect()
        peer.send(data)
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.socket.close()
    running.peers[1:] = []
    eventually(lambda: running.call(lambda: len(running.server._connections)) == 1)
    stays.expect_reply(get(3), bulk(b"3"))


def test_idle_clients_are_only_number(start: Callable[..., Any]) -> None:
    running = start(maxclients=3_000)
    peers = [running.connect() for _ in range(1_500)]
    for peer in peers[::3]:
        peer.send(get(9)[:-1])  # all but the end
    peers[0].expect_reply(b"\n", bulk(b"9"))
    peers[-1].expect_reply(get(1), bulk(b"1"))
    for peer in peers[3::3]:
        peer.expect_reply(b"\n", bulk(b"9"))
    for peer in peers[1:]:
        peer.socket.close()
    eventually(lambda: running.call(lambda: len(running.server._connections)) == 1)
    peers[0].expect_reply(get(2), bulk(b"2"))


def test_client_beyond_limit_gets_error(start: Callable[..., Any]) -> None:
    running = start(maxclients=2)
    first, second = running.connect(), running.connect()
    for peer in (first, second):
        peer.expect_reply(PING, PONG)
    assert running.connect().read_all() == b"-ERR max number of clients reached\r\n"
    first.socket.close()
    eventually(lambda: running.call(lambda: len(running.server._connections)) == 1)
    running.connect().expect_reply(get(1), bulk(b"1"))


def test_client_is_killed_by_another_while_it_is_answered(start: Callable[..., Any]) -> None:
    running = start()
    killer, killed, idle = (running.connect() for _ in range(3))
    for peer in (killer, killed, idle):
        peer.expect_reply(PING, PONG)
    killed.send(GET_LARGE * 500)
    killer.expect_reply(packed(b"CLIENT", b"KILL", b"ID", b"2") + get(1), b":1\r\n" + bulk(b"1"))
    killer.expect_reply(packed(b"CLIENT", b"KILL", b"ID", b"3") + get(1), b":1\r\n" + bulk(b"1"))
    whole = bulk(LARGE) * 500
    assert whole.startswith(killed.read_until_cut())
    assert idle.read_until_cut() == b""
    eventually(lambda: running.call(lambda: len(running.server._connections)) == 1)


def test_killed_client_sees_its_end_before_client_kill_is_answered(start: Callable[..., Any]) -> None:
    running = start()
    killer = running.connect()
    killer.expect_reply(PING, PONG)
    for number in range(2, 52):
        killed = running.connect()
        killed.expect_reply(PING, PONG)
        killer.expect_reply(packed(b"CLIENT", b"KILL", b"ID", b"%d" % number), b":1\r\n")
        killed.socket.setblocking(False)
        assert killed.socket.recv(1) == b""  # BlockingIOError: not yet


def test_client_that_kills_itself_gets_earlier_replies(start: Callable[..., Any]) -> None:
    running = start()
    for end, last in [(b"QUIT\r\n", b"+OK\r\n"), (b"*x\r\n", b"-ERR Protocol error: invalid multibulk length\r\n")]:
        peer = running.connect()
        peer.send(get(1) + GET_LARGE * 20 + end + get(2))
        assert peer.read_all() == bulk(b"1") + bulk(LARGE) * 20 + last


def test_publish_after_end_of_subscriber_reaches_no_client(start: Callable[..., Any]) -> None:
    running = start()
    publisher = running.connect()
    for _ in range(300):
        subscriber = running.connect()
        subscriber.send(packed(b"SUBSCRIBE", b"x") + b"QUIT\r\n")
        assert subscriber.read_all().endswith(b"+OK\r\n")
        publisher.expect_reply(packed(b"PUBLISH", b"x", b"unheard"), b":0\r\n")


def test_pause_holds_all_clients_and_their_requests_are_answered_later(start: Callable[..., Any]) -> None:
    running = start()
    pausing, held = running.connect(), running.connect()
    held.expect_reply(get(1), bulk(b"1"))
    pausing.expect_reply(packed(b"CLIENT", b"PAUSE", b"600000"), b"+OK\r\n")
    held.send(get(1) * 3)
    eventually(lambda: running.call(lambda: running.server.context.stats.input_bytes) > 0)
    running.call(lambda: None)
    held.socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        held.socket.recv(1)
    held.socket.setblocking(True)
    running.call(running.server.context.observation.pause.end)
    held.expect_reply(get(2), bulk(b"1") * 3 + bulk(b"2"))


def test_messages_come_between_whole_replies(start: Callable[..., Any]) -> None:
    running = start()
    reader, speaker = running.connect(), running.connect()
    reader.send(b"HELLO 3\r\nSUBSCRIBE a\r\nECHO end\r\n")
    reader.read_until(b"end\r\n")
    message = b">3\r\n" + bulk(b"message") + bulk(b"a") + bulk(b"hear")
    for _ in range(30):
        reader.send(get(1) * 50 + GET_LARGE)
        speaker.send(packed(b"PUBLISH", b"a", b"hear") * 3)
    got = reader.read(30 * (50 * len(bulk(b"1")) + len(bulk(LARGE)) + 3 * len(message)))
    assert got.count(message) == 90
    assert got.replace(message, b"") == (bulk(b"1") * 50 + bulk(LARGE)) * 30


def test_only_subscriber_that_reads_nothing_is_cut(start: Callable[..., Any]) -> None:
    running = start(client_output_buffer_limit=OUTPUT_LIMITS | {"pubsub": (1 << 20, 8 << 20, 60)})
    slow, speaker = running.connect(), running.connect()
    slow.expect_reply(b"SUBSCRIBE a\r\n", b"*3\r\n" + bulk(b"subscribe") + bulk(b"a") + b":1\r\n")
    text = b"x" * 60_000
    while running.call(lambda: len(running.server._connections)) == 2:
        speaker.send(packed(b"PUBLISH", b"a", text) + get(1))
        assert speaker.read(len(b":1\r\n" + bulk(b"1"))) in (b":1\r\n" + bulk(b"1"), b":0\r\n" + bulk(b"1"))
    assert running.call(lambda: running.server.context.stats.closed_for_output) == 1


def test_paused_subscriber_with_pending_input_is_not_cut(start: Callable[..., Any]) -> None:
    running = start()
    slow, speaker = running.connect(), running.connect()
    slow.expect_reply(b"SUBSCRIBE a\r\n", b"*3\r\n" + bulk(b"subscribe") + bulk(b"a") + b":1\r\n")
    text = b"x" * 60_000
    count = 200  # 12 MB: the socket is full
    for _ in range(count):
        speaker.send(packed(b"PUBLISH", b"a", text))
        slow.send(PING)
    assert speaker.read(4 * count) == b":1\r\n" * count
    message = b"*3\r\n" + bulk(b"message") + bulk(b"a") + bulk(text)
    pong = b"*2\r\n" + bulk(b"pong") + bulk(b"")
    got = slow.read(count * (len(message) + len(pong)))
    assert (got.count(message), got.count(pong)) == (count, count)


@pytest.mark.parametrize("seed", range(4))
def test_clients_of_one_round_are_answered_each_by_its_own(start: Callable[..., Any], seed: int) -> None:
    """What several clients sent is looked up together: plain ones, one with rules, some that track, some that go."""
    dice = random.Random(seed)
    running = start()
    running.connect().expect_reply(
        packed(b"ACL", b"SETUSER", b"ann", b"on", b"nopass", b"~job:*", b"~nope", b"&*", b"+@all"), b"+OK\r\n"
    )
    peers = [running.connect() for _ in range(16)]
    talks = [mixture(dice, 150) for _ in peers]
    for at in range(0, 16, 5):
        peers[at].expect_reply(packed(b"AUTH", b"ann", b"any"), b"+OK\r\n")
    for at in range(1, 16, 5):
        peers[at].send(packed(b"HELLO", b"3") + packed(b"CLIENT", b"TRACKING", b"ON"))
        peers[at].read_until(b"+OK\r\n")
        numbers = [dice.randrange(KEYS) for _ in range(400)]
        talks[at] = b"".join(map(get, numbers)), b"".join(bulk(b"%d" % number) for number in numbers)
    going = {2, 9}
    left = [sent for sent, _ in talks]

    def send() -> None:
        """Send in a turn of the server's own loop, so that it finds all of it at once."""
        for at in dice.sample(range(len(peers)), len(peers)):
            size = dice.choice((0, 30, 200, len(get(1)), 3_000))
            if left[at] and size:
                peers[at].send(left[at][:size])
                left[at] = left[at][size:]
            if at in going and dice.random() < 0.1:
                going.remove(at)
                left[at] = b""
                peers[at].socket.close()
                talks[at] = b"", b""

    while any(left):
        running.call(send)
    for peer, (sent, expected) in zip(peers, talks, strict=True):
        if sent:
            assert peer.read(len(expected)) == expected


def test_bytes_are_counted_once(start: Callable[..., Any]) -> None:
    running = start()
    peer = running.connect()
    sent, expected = mixture(random.Random(5), 300)
    peer.expect_reply(sent, expected)
    peer.expect_reply(get(1)[:-5], b"")
    peer.expect_reply(get(1)[-5:], bulk(b"1"))
    stats = running.server.context.stats
    running.call(stats.collect)
    assert running.call(lambda: (stats.input_bytes, stats.output_bytes)) == (
        len(sent) + len(get(1)),
        len(expected) + len(bulk(b"1")),
    )


def test_bytes_and_requests_of_each_client_are_counted_once(start: Callable[..., Any]) -> None:
    running = start()
    dice = random.Random(6)
    peers = [running.connect() for _ in range(3)]
    talks = [mixture(dice, 100 * (at + 1)) for at in range(3)]
    for start_at in range(0, max(len(sent) for sent, _ in talks), 1_000):  # all clients in the same rounds
        for peer, (sent, _) in zip(peers, talks, strict=True):
            peer.send(sent[start_at : start_at + 1_000])
    for peer, (_, expected) in zip(peers, talks, strict=True):
        assert peer.read(len(expected)) == expected
    for at, (peer, (sent, expected)) in enumerate(zip(peers, talks, strict=True)):
        peer.send(packed(b"CLIENT", b"INFO"))
        line = dict(part.partition("=")[::2] for part in peer.reply().decode().split())
        found = [int(line[name]) for name in ("tot-cmds", "tot-net-in", "tot-net-out")]
        assert found == [100 * (at + 1), len(sent) + len(packed(b"CLIENT", b"INFO")), len(expected)]


def test_calls_of_system_and_rounds_are_counted(start: Callable[..., Any]) -> None:
    server = start()
    peer = server.connect()
    for _ in range(20):
        peer.expect_reply(get(1) + packed(b"ECHO", b"x"), bulk(b"1") + bulk(b"x"))
    numbers = server.call(lambda: server.server.context.stats.to_json())
    assert numbers["reads"] >= 20 and numbers["writes"] >= 20
    if native.sockets is not None:
        assert numbers["rounds"] >= 20 and numbers["rounds_ns"] > 0
    peer.ask("CONFIG", "RESETSTAT")
    assert 0 < server.call(lambda: server.server.context.stats.to_json())["writes"] < 20


def test_many_that_always_send_are_all_answered(start: Callable[..., Any]) -> None:
    running = start()
    peers = [running.connect() for _ in range(24)]
    rounds = 4
    for _ in range(rounds):
        for peer in peers:
            peer.send(get(7) * 1_000)
    for peer in peers:
        assert peer.read(rounds * 1_000 * len(bulk(b"7"))) == bulk(b"7") * 1_000 * rounds


def test_server_sends_pending_replies_then_stops(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resp_server.client.connection.TURN_NS_MAX", 3_600_000_000_000)  # all is answered in one turn
    running = start()
    peer = running.connect()
    peer.expect_reply(PING, PONG)
    peer.send(get(1) * 100)
    assert peer.read(1) == b"$"
    running.run(running.server.stop())
    assert b"$" + peer.read_all() == bulk(b"1") * 100


def test_connection_lost_is_called_once_after_close(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """connection_lost is called once, however it ends, and never from within the call that ends it."""
    running = start()
    peer = running.connect()
    peer.expect_reply(PING, PONG)
    calls: list[str] = []
    lost = Connection.connection_lost

    def losing(connection: Connection, error: Exception | None) -> None:
        calls.append("lost")
        lost(connection, error)

    monkeypatch.setattr(Connection, "connection_lost", losing)

    def end() -> list[str]:
        (connection,) = running.server._connections.values()
        transport = connection._transport
        transport.write(b"x" * 10)
        transport.abort()
        transport.abort()
        transport.close()
        transport.write(b"y")
        return list(calls)

    assert running.call(end) == []
    eventually(lambda: running.call(lambda: calls == ["lost"]))
    peer.read_until_cut()
    assert calls == ["lost"]


def test_clients_that_always_send_take_turns(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []

    def hear(connection: Connection, data: bytes) -> None:
        turns.append(connection.session.id)
        sleep(0.01)  # longer than a round may take

    monkeypatch.setattr(Connection, "data_received", hear)
    running = start()
    peers = [running.connect() for _ in range(4)]
    eventually(lambda: running.call(lambda: len(running.server._connections)) == 4)

    def send() -> None:
        for peer in peers:
            peer.socket.setblocking(False)
            for _ in range(3):  # several reads of each wait
                peer.socket.send(b"x" * 100_000)

    running.call(send)
    eventually(lambda: len(turns) >= 8)
    for at in (0, 4):
        assert sorted(turns[at : at + 4]) == [1, 2, 3, 4]


def test_user_may_not_read_key_behind_others_of_one_round(start: Callable[..., Any]) -> None:
    running = start()
    admin, *peers = (running.connect() for _ in range(4))
    assert admin.ask("ACL", "SETUSER", "few", "on", "nopass", "~job:v:1", "+@all") == b"OK"
    for peer in peers:
        assert peer.ask("AUTH", "few", "x") == b"OK"
    denied = b"-NOPERM No permissions to access a key\r\n"
    running.call(lambda: [peer.send(get(1) + get(2) + get(1)) for peer in peers])  # found in one round
    for peer in peers:
        peer.expect(bulk(b"1") + denied + bulk(b"1"))


def test_connection_commands_keep_their_place_in_pipeline(start: Callable[..., Any]) -> None:
    peer = start().connect()
    peer.send(packed(b"COMMAND", b"DOCS", b"GET") + packed(b"ECHO", b"end"))
    docs = peer.read_until(bulk(b"end")).removesuffix(bulk(b"end"))
    name, named = packed(b"CLIENT", b"GETNAME"), bulk(b"ann")
    off, on = packed(b"CLIENT", b"REPLY", b"OFF"), packed(b"CLIENT", b"REPLY", b"ON")
    first, zeroth = packed(b"SELECT", b"1"), packed(b"SELECT", b"0")
    wrong = b"-ERR wrong number of arguments for 'client|getname' command\r\n"
    queued = b"+OK\r\n" + b"+QUEUED\r\n" * 2 + b"*2\r\n"
    cases = [
        (packed(b"CLIENT", b"SETNAME", b"ann"), b"+OK\r\n"),
        (get(1) + name + get(2) + name * 2, bulk(b"1") + named + bulk(b"2") + named * 2),
        (name + packed(b"COMMAND", b"DOCS", b"GET") * 2 + name + get(1), named + docs * 2 + named + bulk(b"1")),
        (packed(b"CLIENT", b"GETNAME", b"more") + name, wrong + named),
        (packed(b"CLIENT", b"REPLY", b"SKIP") + name * 2 + get(1), named + bulk(b"1")),
        (off + name * 2 + get(1) + on + name, b"+OK\r\n" + named),
        (first + name + get(1) + zeroth + get(1), b"+OK\r\n" + named + b"$-1\r\n+OK\r\n" + bulk(b"1")),
        (packed(b"MULTI") + name + get(1) + packed(b"EXEC") + name, queued + named + bulk(b"1") + named),
        (packed(b"CLIENT", b"PAUSE", b"0") + name + get(1), b"+OK\r\n" + named + bulk(b"1")),
        (name + packed(b"RESET") + name, named + b"+RESET\r\n$-1\r\n"),
    ]
    for sent, expected in cases:
        peer.expect_reply(sent, expected)
        for byte in sent[:-1]:
            peer.send(bytes([byte]))
        peer.expect_reply(sent[-1:], expected if b"RESET" not in sent else b"$-1\r\n+RESET\r\n$-1\r\n")
    peer.send(name + packed(b"QUIT") + name + get(1))
    assert peer.read_all() == b"$-1\r\n+OK\r\n"


def test_one_clients_costly_commands_leave_turns_to_others(start: Callable[..., Any]) -> None:
    running = start()
    greedy, other = running.connect(), running.connect()
    greedy.send(packed(b"ACL", b"CAT", b"read") * 2_000)
    other.expect_reply(get(5), bulk(b"5"))
    greedy.send(PING)
    assert greedy.read_until(PONG).count(b"\r\nget\r\n") == 2_000
