"""A proxy with an upstream: the owner of a key answers, and a request that needs both backends gets a clear error."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from compat.conformance.servers import redis_server
from compat.conformance.wire import Connection, replies_to
from compat.waiting import eventually
from state_backend import VERSION
from tests.server.nodes import HALVES
from tests.server.overlay import ABSENT, Overlay


@pytest.mark.parametrize("key", ["job:speed", "job:other:1", "dash/7", "dash/7/apdex/more", "x/dash/7/apdex", "dash"])
def test_similar_key_is_upstreams(client: Connection, key: str) -> None:
    assert client.call("SET", key, "mine").plain == b"OK"
    assert client.call("GETDEL", key).plain == b"mine"


def test_error_of_unsplittable_read_names_owners(client: Connection) -> None:
    assert client.call("SUNION", "a", "job:speed:1").plain == (
        b"ERR command 'sunion' needs keys of one backend: key 'a' is the upstream's, key 'job:speed:1' is owned by "
        b"state job:speed"
    )


@pytest.mark.parametrize(
    "line",
    [
        *(
            "SHUTDOWN",
            "DEBUG SLEEP 0",
            "REPLICAOF NO ONE",
            "SLAVEOF NO ONE",
            "FAILOVER",
            "MODULE UNLOAD x",
            "SYNC",
            "PSYNC ? -1",
        ),
        *(
            "MIGRATE h 1 k 0 1",
            "CONFIG SET maxmemory 1",
            "ACL SETUSER x",
            "ACL DELUSER x",
            "ACL LOAD",
            "REPLCONF a b",
            "SCRIPT DEBUG YES",
        ),
    ],
)
def test_administrative_commands_are_refused(client: Connection, line: str) -> None:
    reply = client.call(*line.split(" "))
    assert reply.is_error and b"is not passed on to the upstream" in reply.plain, reply


@pytest.mark.parametrize("protocol", [2, 3])
def test_config_set_accepts_events_of_upstream(overlay: Overlay, client: Connection, protocol: int) -> None:
    def set_events(letters: str) -> Any:
        return client.call("CONFIG", "SET", "notify-keyspace-events", letters).plain

    client.call("HELLO", protocol)
    with overlay.upstream.connect() as direct:
        direct.call("CONFIG", "SET", "notify-keyspace-events", "KEx$g")
        assert [set_events(letters) for letters in ("xE", "Kg$", "EK")] == [b"OK"] * 3
        assert set_events("Exs") == (
            b"ERR the upstream's notify-keyspace-events is 'g$xKE', and CONFIG SET is not passed on: run CONFIG SET "
            b"notify-keyspace-events 'g$sxKE' at the upstream's own address"
        )
        assert set_events("KEA").endswith(b"notify-keyspace-events 'AKE' at the upstream's own address")
        assert set_events("").endswith(b"notify-keyspace-events '' at the upstream's own address")
        direct.call("CONFIG", "SET", "notify-keyspace-events", "AKE")
        assert [set_events(letters) for letters in ("Egx", "KEA", "g$lshzxetdK")] == [b"OK"] * 3
        assert b"Invalid event class character" in set_events("q")
        more = ("CONFIG", "SET", "notify-keyspace-events", "K", "maxmemory", "1")
        assert b"is not passed on to the upstream" in client.call(*more).plain
        direct.call("CONFIG", "SET", "notify-keyspace-events", "")
        assert set_events("") == b"OK"
        client.call("MULTI")
        assert b"is not passed on to the upstream" in set_events("")
        assert client.call("EXEC").is_error


def test_upstream_allow_passes_commands_on(overlay: Overlay) -> None:
    allowed = ("--upstream-allow", "config set", "--upstream-allow", "ACL  SETUSER", "--upstream-allow", "DEBUG")
    proxy = overlay.start_at(f"redis://127.0.0.1:{overlay.upstream.port}", *allowed)
    with proxy.connect() as client, overlay.upstream.connect() as direct:
        eventually(lambda: not client.call("GET", "nobody's").is_error)
        assert client.call("CONFIG", "SET", "lua-time-limit", "4999").plain == b"OK"
        assert direct.call("CONFIG", "GET", "lua-time-limit").plain == [b"lua-time-limit", b"4999"]
        assert client.call("ACL", "SETUSER", "made", "on", "nopass").plain == b"OK"
        assert b"made" in direct.call("ACL", "USERS").plain and b"made" not in client.call("ACL", "USERS").plain
        assert client.call("DEBUG", "SLEEP", "0").raw == direct.call("DEBUG", "SLEEP", "0").raw
        for line in ("ACL DELUSER made", "SHUTDOWN", "SCRIPT DEBUG YES"):
            assert b"is not passed on to the upstream" in client.call(*line.split()).plain
        direct.call("ACL", "DELUSER", "made")


def test_module_list_is_allowed(client: Connection) -> None:
    assert client.call("MODULE", "LIST").plain == []


def test_info_is_upstreams_with_section_of_proxy(overlay: Overlay, client: Connection) -> None:
    assert f"tcp_port:{overlay.upstream.port}".encode() in client.call("INFO").plain
    assert b"maxmemory_policy:noeviction" in client.call("INFO", "memory").plain
    fields = overlay.info()
    assert fields["upstream"] == f"127.0.0.1:{overlay.upstream.port}" and fields["upstream_status"] == "up"
    assert (fields["owned_key_formats"], fields["sparkis_version"]) == ("2", VERSION)


@pytest.mark.parametrize("protocol", [2, 3])
def test_hello_shows_version_of_upstream(overlay: Overlay, client: Connection, protocol: int) -> None:
    with overlay.upstream.connect() as upstream:
        eventually(lambda: client.call("GET", "nobody's").plain is None)
        replies = [each.call("HELLO", protocol).plain for each in (upstream, client)]
    theirs, ours = (dict(zip(each[::2], each[1::2], strict=True)) for each in replies)
    assert {**theirs, b"id": ours[b"id"], b"sparkis_version": VERSION.encode()} == ours


def test_hello_in_pipeline_keeps_order(overlay: Overlay) -> None:
    pipeline = [
        [b"SET", b"p", b"1"],
        [b"HELLO", b"3"],
        [b"INCR", b"p"],
        [b"HELLO", b"2"],
        [b"INCR", b"p"],
        [b"GET", b"p"],
    ]
    for _ in range(20):
        found = replies_to(overlay.proxy.port, pipeline)
        assert [found[at].plain for at in (0, 2, 4, 5)] == [b"OK", 2, 3, b"3"]


def test_redis_py_works_unchanged(overlay: Overlay) -> None:
    with redis.Redis(port=overlay.proxy.port, protocol=3, decode_responses=True) as client:
        client.delete("jobs", "profile")
        client.rpush("jobs", "a", "b")
        client.hset("profile", mapping={"name": "ada"})
        with client.pipeline(transaction=False) as pipeline:
            pipeline.lrange("jobs", 0, -1).get("job:speed:4").hgetall("profile").get("dash/7/apdex")
            assert pipeline.execute() == [["a", "b"], "40", {"name": "ada"}, "0.9"]
        script = client.register_script("return redis.call('incr', KEYS[1])")
        assert script(keys=["counter"]) == 1


def test_acl_rules_apply_to_both_backends(tmp_path: Path, overlay: Overlay) -> None:
    users = tmp_path / "users"
    users.write_text("user default off\nuser app on >app ~session:* ~job:* +@read +set\n")
    proxy = overlay.start_overlay("--aclfile", str(users), is_ready=False)
    with Connection(proxy.port) as client:
        assert client.call("GET", "session:1").plain.startswith(b"NOAUTH")
        assert client.call("SET", "job:speed:1", "1").plain.startswith(b"NOAUTH")
        assert client.call("AUTH", "app", "app").plain == b"OK"
        eventually(lambda: client.call("GET", "job:speed:1").plain == b"10")
        assert client.call("SET", "session:9", "x").plain == b"OK"
        assert client.call("GET", "other").plain.startswith(b"NOPERM")
        assert client.call("LPUSH", "session:9", "x").plain.startswith(b"NOPERM")


def test_acl_load_reloads_users_of_proxy(tmp_path: Path, overlay: Overlay) -> None:
    users = tmp_path / "users"
    users.write_text("user default on nopass ~* &* +@all\n")
    proxy = overlay.start_overlay("--aclfile", str(users))
    with Connection(proxy.port) as client, Connection(proxy.port) as admin:
        assert client.call("SET", "other", "x").plain == b"OK"
        users.write_text("user default on nopass ~session:* ~job:speed:1 &* +@all\n")
        assert admin.call("ACL", "LOAD").plain == b"OK"
        assert client.call("GET", "job:speed:1").plain == b"10"
        for line in (["GET", "other"], ["GET", "job:speed:2"], ["SET", "other", "y"]):
            assert client.call(*line).plain.startswith(b"NOPERM")
        users.write_text("user default on nopass ~* nonsense\n")
        assert b"Syntax error" in admin.call("ACL", "LOAD").plain
        assert client.call("GET", "other").plain.startswith(b"NOPERM")


def test_command_table_is_upstreams(client: Connection) -> None:
    assert b"set" in {each[0] for each in client.call("COMMAND").plain}  # the reply is the upstream's own
    assert client.call("NOSUCH", "a").plain == b"ERR unknown command 'NOSUCH', with args beginning with: 'a' "


def test_keys_are_loading_until_owners_are_known(tmp_path: Path) -> None:
    with ExitStack() as stack:
        overlay = Overlay(tmp_path, stack)
        found = json.loads(overlay.ownership.read_text())
        assert found["jobs"] == {"job": {"speed": ["job:speed:<car>"], "apdex": ["dash/<account>/apdex"]}}
        for node in overlay.nodes:
            node.process.terminate()
            node.process.wait()
        again = overlay.start_overlay("--server-timeout", "300", is_ready=False)
        with again.connect() as client:
            eventually(lambda: client.call("SET", "mine", "1").plain == b"OK")
            reply = client.call("GET", ABSENT)
            assert reply.is_error and not reply.plain.startswith(b"LOADING"), reply
            assert client.call("SET", ABSENT, "1").plain == b"ERR key 'job:speed:absent' is owned by state job:speed"
        overlay.ownership.unlink()
        unknowing = overlay.start_overlay("--server-timeout", "300", is_ready=False)
        with unknowing.connect() as client:
            for line in ("GET mine", "SET mine 2", "GET job:speed:1", "MGET mine job:speed:1"):
                assert client.call(*line.split(" ")).plain.startswith(b"LOADING the key formats of the states"), line
            assert client.call("PING").plain == b"PONG"
            for at in range(len(HALVES)):
                overlay.start(at)
            eventually(lambda: client.call("GET", "mine").plain == b"1")
            eventually(lambda: client.call("GET", "job:speed:1").plain == b"10")


def test_upstream_url_may_name_unix_socket_password_and_database(tmp_path: Path, overlay: Overlay) -> None:
    path = tmp_path / "redis.sock"
    with redis_server(tmp_path, "--unixsocket", str(path), password="p@ss") as upstream:
        proxy = overlay.start_at(f"unix://default:p%40ss@{path}?db=3")
        with proxy.connect() as client, upstream.connect() as direct:
            eventually(lambda: client.call("SET", "k", "v").plain == b"OK")
            assert client.call("HELLO", 3).raw.startswith(b"%")
            assert client.call("GET", "k").plain == b"v"
            assert client.call("SELECT", "3").plain == b"OK"
            assert direct.call("GET", "k").plain is None
            direct.call("SELECT", "3")
            assert direct.call("GET", "k").plain == b"v"


def test_wrong_password_fails_only_upstream_keys(tmp_path: Path, overlay: Overlay) -> None:
    with redis_server(tmp_path, password="right") as upstream:
        proxy = overlay.start_at(f"redis://:wrong@127.0.0.1:{upstream.port}")
        with proxy.connect() as client:
            eventually(lambda: client.call("GET", "job:speed:1").plain == b"10")
            assert client.call("GET", "k").plain.startswith(b"TRYAGAIN the upstream 127.0.0.1:")
            eventually(lambda: b"WRONGPASS" in client.call("GET", "k").plain)


def test_state_history_of_states_key_and_error_for_upstreams(client: Connection) -> None:
    [row] = client.call("STATE", "HISTORY", "job:speed:3").plain
    assert row[4:8] == [b"kind", b"value", b"value", b"30"]
    error = "-ERR STATE HISTORY is not available for keys of the upstream: key 'session:1' is the upstream's\r\n"
    assert client.call("STATE", "HISTORY", "session:1").raw.decode() == error
    client.call("MULTI")
    assert client.call("STATE", "HISTORY", "job:speed:3").raw == b"-ERR Command not allowed inside a transaction\r\n"
    client.call("DISCARD")
