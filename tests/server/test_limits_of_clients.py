"""Limits of the memory that one client takes: each is shown, may change while the server runs, and is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from compat.conformance.wire import request
from compat.waiting import eventually
from resp_server.settings.config_values import INT32_MAX, INT64_MAX, SettingError
from resp_server.settings.server import OUTPUT_LIMITS, ROWS

pytestmark = pytest.mark.pure

PING, PONG = request("PING"), b"+PONG\r\n"
NOW_MS = 1_700_000_000_000
OUTPUT_ERROR = (
    b"Error in hard, soft or soft_seconds setting in buffer limit configuration. A hard limit is 1 to 1073741824"
)


def is_accepted(parse: Callable[[bytes], Any], text: str) -> bool:
    try:
        parse(text.encode())
    except SettingError:
        return False
    return True


def setting(peer: Any, name: str) -> bytes:
    return bytes(dict(zip(*[iter(peer.ask("CONFIG", "GET", name))] * 2, strict=True))[name.encode()])


@pytest.mark.parametrize(
    ("name", "given", "shown"),
    [
        ("maxclients", "50", b"50"),
        ("timeout", "30", b"30"),
        ("tcp-keepalive", "0", b"0"),
        ("protected-mode", "no", b"no"),
        ("client-query-buffer-limit", "2mb", b"2097152"),
        ("proto-max-bulk-len", "1mb", b"1048576"),
        ("acllog-max-len", "3", b"3"),
        ("client-output-buffer-limit", "pubsub 1mb 512kb 5", b"normal 1073741824 0 0 pubsub 1048576 524288 5"),
        ("client-output-buffer-limit", "normal 1mb 0 0 PUBSUB 2mb 0 0", b"normal 1048576 0 0 pubsub 2097152 0 0"),
    ],
)
def test_limits_are_changed_at_run_time(serve: Callable[..., Any], name: str, given: str, shown: bytes) -> None:
    peer = serve().connect()
    assert peer.ask("CONFIG", "SET", name, given) == b"OK"
    assert setting(peer, name) == shown


# Each modifiable setting with the extreme values that it takes.
EXTREMES = [
    (row.option, text)
    for row in ROWS.values()
    if row.config is not None and row.config.parse is not None
    for text in ("-1", "0", str(INT32_MAX), str(2**32 - 1), str(INT64_MAX), "512mb", "1gb", "KEA", "nothing")
    if is_accepted(row.config.parse, text) and row.option != "requirepass"
]


@pytest.mark.parametrize(("name", "given"), EXTREMES)
def test_config_set_of_extreme_value_leaves_server_answering(serve: Callable[..., Any], name: str, given: str) -> None:
    running = serve()
    peer = running.connect()
    assert peer.ask("CONFIG", "SET", name, given) == b"OK"
    assert peer.ask("GET", "nothing") is None
    assert running.connect().ask("PING") == b"PONG"
    assert peer.ask("CONFIG", "GET", name)


@pytest.mark.parametrize(
    ("name", "given", "reason"),
    [
        ("maxclients", "0", b"argument must be between 1 and 4294967295 inclusive"),
        ("client-query-buffer-limit", "1", b"argument must be between 1048576 and 1073741824 inclusive"),
        ("client-output-buffer-limit", "normal 1mb 0", b"Wrong number of arguments in buffer limit configuration."),
        ("client-output-buffer-limit", "x 1 0 0", b"Invalid client class specified in buffer limit configuration."),
        (
            "client-output-buffer-limit",
            "normal 0 0 0",
            OUTPUT_ERROR,
        ),
        ("protected-mode", "maybe", b"argument must be 'yes' or 'no'"),
    ],
)
def test_wrong_value_of_limit_is_refused(serve: Callable[..., Any], name: str, given: str, reason: bytes) -> None:
    peer = serve().connect()
    before = setting(peer, name)
    reply = peer.ask("CONFIG", "SET", name, given)
    assert reply == b"ERR CONFIG SET failed (possibly related to argument '%b') - %b" % (name.encode(), reason)
    assert setting(peer, name) == before


def test_lower_number_of_clients_keeps_new_ones_out(serve: Callable[..., Any]) -> None:
    running = serve()
    first = running.connect()
    first.ask("CONFIG", "SET", "maxclients", 1)
    assert running.connect().read_all() == b"-ERR max number of clients reached\r\n"
    first.expect_reply(PING, PONG)


def test_request_beyond_query_buffer_ends_connection_that_sends_it(serve: Callable[..., Any]) -> None:
    running = serve()
    flooding, other = running.connect(), running.connect()
    other.ask("CONFIG", "SET", "client-query-buffer-limit", "1mb")
    flooding.expect_reply(PING, PONG)
    running.call(lambda: running.server.sweep(NOW_MS))
    flooding.send(b"*100\r\n" + (b"$100000\r\n" + b"x" * 100_000 + b"\r\n") * 20)
    assert flooding.read_until_cut() == b""
    other.expect_reply(PING, PONG)
    assert b"client_query_buffer_limit_disconnections:1\r\n" in other.ask("INFO", "stats")


def test_silent_subscriber_is_cut_after_soft_limit(serve: Callable[..., Any]) -> None:
    running = serve(client_output_buffer_limit=OUTPUT_LIMITS | {"pubsub": (64 << 20, 1 << 20, 5)})
    slow, other = running.connect(), running.connect()
    assert slow.ask("SUBSCRIBE", "news")[0] == b"subscribe"
    for _ in range(16):  # more than the system takes for a client that reads nothing
        assert other.ask("PUBLISH", "news", b"x" * (1 << 20)) == 1
    connection = running.server._connections[1]
    # What the system takes of it, it takes in its own time.
    eventually(lambda: running.call(lambda: connection.output.size_bytes), lambda size: size > 1 << 20)
    for seconds in (0, 5):
        running.call(lambda seconds=seconds: running.server.sweep(NOW_MS + seconds * 1000))
    assert 1 in running.server._connections
    running.call(lambda: running.server.sweep(NOW_MS + 5001))
    other.expect_reply(PING, PONG)
    eventually(lambda: 1 in running.server._connections, lambda is_there: not is_there)
    assert b"client_output_buffer_limit_disconnections:1\r\n" in other.ask("INFO", "stats")


def test_subscriber_whose_channels_are_taken_away_is_cut(serve: Callable[..., Any]) -> None:
    running = serve()
    peer, other = running.connect(), running.connect()
    other.ask("ACL", "SETUSER", "u", "on", "nopass", "+@all", "&news*", "&more")
    assert peer.ask("AUTH", "u", "") == b"OK"
    assert peer.ask("PSUBSCRIBE", "news") == b"NOPERM No permissions to access a channel"
    assert peer.ask("SUBSCRIBE", "news1")[0] == b"subscribe"
    other.ask("ACL", "SETUSER", "u", "resetchannels", "&news*")
    assert other.ask("PUBLISH", "news1", "x") == 1
    other.ask("ACL", "SETUSER", "u", "resetchannels", "&more")
    assert other.ask("PUBLISH", "news1", "x") == 0


def test_unauthenticated_client_makes_room_for_others(serve: Callable[..., Any]) -> None:
    running = serve(password="secret", maxclients=3)
    auth = request("AUTH", "secret")
    first = running.connect()
    first.expect_reply(auth, b"+OK\r\n")
    strangers = [running.connect() for _ in range(20)]
    last = running.connect()
    last.expect_reply(auth, b"+OK\r\n")
    for stranger in strangers[:-1]:
        stranger.expect_close()
    strangers[-1].expect_reply(auth, b"+OK\r\n")
    assert running.connect().read_all() == b"-ERR max number of clients reached\r\n"
    for each in (first, last, strangers[-1]):
        each.expect_reply(PING, PONG)


def test_time_to_authenticate_is_not_extended_by_requests(serve: Callable[..., Any]) -> None:
    running = serve(password="secret", auth_seconds_max=60)
    known, stranger = running.connect(), running.connect()
    known.expect_reply(request("AUTH", "secret"), b"+OK\r\n")
    for seconds in range(0, 61, 20):
        stranger.expect_reply(PING, b"-NOAUTH Authentication required.\r\n")
        running.call(lambda at=seconds: running.server.sweep(NOW_MS + 1000 * at))
    stranger.expect_reply(PING, b"-NOAUTH Authentication required.\r\n")
    running.call(lambda: running.server.sweep(NOW_MS + 60_001))
    stranger.expect_close()
    known.expect_reply(PING, PONG)
