"""SCAN, KEYS, RANDOMKEY and DBSIZE over a real Redis and the states in front of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from compat.conformance.wire import Connection, scanned
from compat.waiting import eventually
from tests.server.overlay import VALUES, Overlay

OWN = {b"k%d" % number for number in range(500)}


@pytest.fixture(scope="module")
def overlay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Overlay]:
    with ExitStack() as stack:
        made = Overlay(tmp_path_factory.mktemp("overlay"), stack)
        with made.upstream.connect() as upstream:
            upstream.call("MSET", *(word for key in OWN for word in (key, b"x")))
            upstream.call("HSET", "job:speed", "a", "1")
        yield made


ALL = OWN | VALUES.keys() | {b"job:speed"}


def test_scan_continues_at_other_proxy(overlay: Overlay, client: Connection) -> None:
    other = overlay.start_overlay("--ownership", str(overlay.folder / "another.json"))
    found, cursor, at = [], b"0", 0
    with other.connect() as second:
        while True:
            cursor, keys = (client, second)[at % 2].call("SCAN", cursor, "COUNT", "7").plain
            assert int(cursor) < 2**53
            found += keys
            at += 1
            if cursor == b"0":
                break
    assert set(found) == ALL and at > 2


def test_scan_returns_lasting_keys_while_others_change(overlay: Overlay, client: Connection) -> None:
    with overlay.upstream.connect() as upstream:
        found, cursor, number = [], b"0", 0
        while True:
            cursor, keys = client.call("SCAN", cursor, "COUNT", "5").plain
            found += keys
            if cursor == b"0":
                break
            for _ in range(100):  # the upstream's table grows and shrinks meanwhile
                upstream.call("SET", f"new:{number}", "1")
                number += 1
            if number >= 3000:
                upstream.call("DEL", *(f"new:{each}" for each in range(number)))
        upstream.call("DEL", *(f"new:{each}" for each in range(number)))
    assert set(found) >= ALL


def test_randomkey_draws_from_both_backends_and_no_copy(client: Connection) -> None:
    found: set[bytes] = set()

    def has_drawn_from_both() -> bool:
        found.add(client.call("RANDOMKEY").plain)
        return bool(found & OWN and found & VALUES.keys())

    eventually(has_drawn_from_both)
    assert found <= ALL


def test_suppressed_scan_sends_nothing(client: Connection) -> None:
    client.send(b"CLIENT REPLY SKIP\r\nSCAN 0\r\nCLIENT REPLY SKIP\r\nKEYS *\r\nPING\r\n")
    assert client.read().plain == b"PONG"


def test_scans_and_writes_in_pipeline_keep_order(client: Connection) -> None:
    client.send(b"SET extra 1\r\nKEYS extra\r\nDEL extra\r\nKEYS extra\r\nGET job:speed:2\r\nSCAN 1\r\nDBSIZE\r\n")
    replies = [client.read().plain for _ in range(7)]
    assert replies[:5] == [b"OK", [b"extra"], 1, [], b"20"] and isinstance(replies[6], int)


def test_acl_patterns_limit_scan_of_both_backends(tmp_path: Path, overlay: Overlay) -> None:
    users = tmp_path / "users"
    users.write_text("user default off\nuser app on >app ~k1* ~dash/* +@all\nuser none on >none ~* +get\n")
    proxy = overlay.start_overlay("--aclfile", str(users), is_ready=False)
    expected = {key for key in ALL if key.startswith((b"k1", b"dash/"))}
    with Connection(proxy.port) as client:
        assert client.call("SCAN", "0").plain.startswith(b"NOAUTH")
        client.call("AUTH", "app", "app")
        eventually(lambda: set(client.call("KEYS", "*").plain) == expected)
        assert set(scanned(client)) == expected
        eventually(lambda: client.call("RANDOMKEY").plain in expected)
        client.call("AUTH", "none", "none")
        for line in ("SCAN 0", "KEYS *", "DBSIZE", "RANDOMKEY"):
            assert client.call(*line.split(" ")).plain.startswith(b"NOPERM"), line


def test_randomkey_with_only_copies_at_upstream_returns_states_key(tmp_path: Path) -> None:
    with ExitStack() as stack:
        overlay = Overlay(tmp_path, stack)
        with overlay.proxy.connect() as client:
            for _ in range(5):
                assert client.call("RANDOMKEY").plain in VALUES
            assert set(scanned(client)) == VALUES.keys()
