"""Values that are not committed yet, at a server: each path reads them, none lists them, their epoch settles them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from compat.conformance.servers import child_environment, redis_server, sparkis_program
from compat.fork_server import STARTS
from compat.waiting import eventually
from resp_server.serving.job_catalog import LocalJobCatalog
from state_backend.fresh.values import FreshValues, folder_of
from state_backend.lmdb.store import LmdbStore
from state_backend.log.log_writer import LogWriter
from state_backend.store.keyspace import Keyspace
from tests.server.fresh_rows import SCHEMA, STATES, Query, World, committed
from tests.server.nodes import PublishedNodes
from tests.server.served_upstream import PROGRAM, StateServer

PATHS = [pytest.param(False, marks=pytest.mark.compiled, id="core"), pytest.param(True, id="pure")]


@pytest.fixture(params=PATHS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path, stack, is_pure=request.param)


def test_reads_of_key_give_newest_row(world: World) -> None:
    assert world.query.open(1) == b"OK"
    assert world.query.rows(1, ("a", 7, 70.5), ("new", 8, 80.5), ("a", 9, 90.25)) == b"OK"
    assert world.call("GET", "job:max:a") == b"90.25"
    assert world.call("GET", "job:max:b") == b"2.5"
    assert world.call("MGET", "job:max:a", "job:max:b", "job:max:new", "job:max:none") == [
        b"90.25",
        b"2.5",
        b"80.5",
        None,
    ]
    assert world.call("HGETALL", "job:all:a") == [b"n", b"9", b"temp", b"90.25"]
    assert world.call("HGET", "job:all:new", "n") == b"8"
    assert world.call("HMGET", "job:all:b", "n", "temp") == [b"2", b"2.5"]
    assert world.call("HLEN", "job:all:new") == 2
    assert world.call("STRLEN", "job:max:a") == 5
    assert world.call("EXISTS", "job:max:new", "job:max:a", "job:max:none") == 2
    assert world.call("TYPE", "job:all:new") == b"hash"
    assert world.call("TTL", "job:max:new") == -1
    assert world.call("TTL", "job:max:none") == -2
    assert world.call("GETRANGE", "job:max:a", 0, 1) == b"90"
    assert world.call("GET", "job:all:new").startswith(b"WRONGTYPE")
    assert world.call("OBJECT", "ENCODING", "job:max:new") is not None
    assert world.call("STATE", "LOCATE", "job:max:new")[5] == b"max"


def test_long_value_is_read_in_steps_and_in_parts(world: World) -> None:
    note = "n" * 900_000
    world.query.open(1)
    assert world.query.rows(1, ("a", 7, 70.5, note)) == b"OK"
    assert world.call("GET", "job:note:a") == note.encode()
    assert world.call("STRLEN", "job:note:a") == len(note)
    assert world.call("GETRANGE", "job:note:a", 899_998, -1) == b"nn"
    assert world.call("MGET", "job:note:a", "job:max:a", "job:note:b") == [note.encode(), b"70.5", None]
    assert world.client.call_each("MULTI", "GET job:note:a", "EXEC") == [b"OK", b"QUEUED", [None]]


def test_lists_and_counts_of_keys_have_committed_ones_only(world: World) -> None:
    world.query.open(1)
    world.query.rows(1, ("new", 8, 80.5))
    assert world.call("GET", "job:max:new") == b"80.5"
    keys = {b"job:max:a", b"job:max:b", b"job:all:a", b"job:all:b"}
    assert world.call("DBSIZE") == 4
    assert set(world.call("KEYS", "*")) == keys
    assert set(world.call("SCAN", 0, "COUNT", 100)[1]) == keys
    assert world.call("RANDOMKEY") in keys
    world.query.commit(("new", 8, 80.5))
    assert world.call("DBSIZE") == 6


def test_transactions_and_watch_read_committed_values(world: World) -> None:
    world.query.open(1)
    world.query.rows(1, ("a", 7, 70.5))
    one_buffer = world.client.call_each("MULTI", "GET job:max:a", "EXEC", "GET job:max:a")
    assert one_buffer == [b"OK", b"QUEUED", [b"1.5"], b"70.5"]
    assert world.call("WATCH", "job:max:a") == b"OK"
    world.query.rows(1, ("a", 8, 80.5))
    assert world.call("MULTI") == b"OK"
    assert world.call("GET", "job:max:a") == b"QUEUED"
    assert world.call("EXEC") == [b"1.5"]
    assert world.call("GET", "job:max:a") == b"80.5"
    assert world.call("WATCH", "job:max:a") == b"OK"
    world.query.commit(("a", 8, 80.5))
    assert world.client.call_each("MULTI", "GET job:max:a", "EXEC") == [b"OK", b"QUEUED", None]


def test_epoch_settles_its_batch_and_no_later_one(world: World) -> None:
    for batch in (1, 2):
        world.query.open(batch)
        world.query.rows(batch, ("a", batch, 10.5 * batch), (f"of {batch}", batch, 0.5))
    assert world.call("MGET", "job:max:a", "job:max:of 1", "job:max:of 2") == [b"21", b"0.5", b"0.5"]
    world.query.commit(("a", 1, 10.5))  # Spark has another last row than its writer sent
    assert world.call("MGET", "job:max:a", "job:max:of 1", "job:max:of 2") == [b"21", None, b"0.5"]
    world.query.commit(("a", 2, 21.0))
    assert world.call("MGET", "job:max:a", "job:max:of 1", "job:max:of 2") == [b"21", None, None]
    assert world.query.rows(2, ("a", 3, 3.0)) == b"OK"  # too late
    assert world.call("GET", "job:max:a") == b"21"


def test_new_run_voids_what_another_one_sent(world: World) -> None:
    world.query.open(1)
    world.query.rows(1, ("a", 7, 70.5), ("b", 7, 70.5))
    world.query.run = "second run"
    world.query.open(1)
    world.query.rows(1, ("b", 8, 80.5))
    assert world.call("MGET", "job:max:a", "job:max:b") == [b"1.5", b"80.5"]


def test_connection_may_read_committed_values(world: World) -> None:
    world.query.open(1)
    world.query.rows(1, ("a", 7, 70.5))
    assert world.call("STATE", "FRESHNESS", "committed") == b"OK"
    assert world.call("GET", "job:max:a") == b"1.5"
    assert world.call("HGET", "job:all:a", "n") == b"1"
    assert world.call("STATE", "FRESHNESS", "RECORD") == b"OK"
    assert world.call("GET", "job:max:a") == b"70.5"
    assert world.call("STATE", "FRESHNESS", "COMMITTED") == b"OK"
    assert world.call("RESET") == b"RESET"
    assert world.call("GET", "job:max:a") == b"70.5"
    assert world.call("STATE", "FRESHNESS", "other").startswith(b"ERR syntax error")


def test_user_may_begin_with_committed_values(tmp_path: Path) -> None:
    with ExitStack() as stack:
        world = World(tmp_path, stack, "--committed-only", "dashboard,other", is_pure=False)
        world.call("ACL", "SETUSER", "dashboard", "on", "nopass", "~*", "+@all")
        world.query.open(1)
        world.query.rows(1, ("a", 7, 70.5))
        assert world.call("CONFIG", "GET", "committed-only") == [b"committed-only", b"dashboard,other"]
        assert world.call("GET", "job:max:a") == b"70.5"
        assert world.call("AUTH", "dashboard", "x") == b"OK"
        assert world.call("GET", "job:max:a") == b"1.5"
        assert world.call("STATE", "FRESHNESS", "RECORD") == b"OK"
        assert world.call("GET", "job:max:a") == b"70.5"
        assert world.call("RESET") == b"RESET"
        assert world.call("GET", "job:max:a") == b"70.5"  # the user default


def test_batch_without_room_shows_nothing_and_room_is_setting(tmp_path: Path) -> None:
    with ExitStack() as stack:
        world = World(tmp_path, stack, "--fresh-values-max-bytes", "1mb", is_pure=False)
        note = "n" * 900_000
        world.query.open(1)
        assert world.query.rows(1, ("a", 7, 70.5)) == b"OK"
        for sensor in "ab":
            reply = world.query.rows(1, (sensor, 7, 70.5, note))
        assert reply.startswith("ERR the values of batch 1 that are not committed yet take more than 1048576 bytes")
        assert world.call("GET", "job:max:a") == b"1.5"
        assert world.query.facts("job")["fresh_incomplete"] == 1
        assert world.call("CONFIG", "SET", "fresh-values-max-bytes", "64mb") == b"OK"
        assert world.query.open(2) == b"OK"
        for sensor in "ab":
            assert world.query.rows(2, (sensor, 7, 70.5, note)) == b"OK"
        assert world.call("STRLEN", "job:note:a") == len(note)


def test_status_counts_uncommitted_values(world: World) -> None:
    world.query.open(1)
    world.query.rows(1, ("a", 7, 70.5))
    url = f"redis://127.0.0.1:{world.server.port}"
    command = [sys.executable, "-m", "sparkis", "status", "--url", url]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=child_environment())
    assert re.search(r"2 values before their commit \(50% of the keys\), \d+\.\d s old", done.stdout)


def test_value_without_heartbeat_is_committed(world: World, tmp_path: Path) -> None:
    world.query.open(1)
    world.query.rows(1, ("a", 7, 70.5))
    world.query._log.close()
    eventually(lambda: world.call("GET", "job:max:a"), lambda value: value == b"1.5", "the end of the query")
    assert world.query.open(1) == "ERR job 'job' has no writer of committed epochs now: its values are not shown"


def test_tracking_client_is_invalidated_by_rows_and_when_they_become_void(world: World) -> None:
    world.query.open(1)
    with world.server.connect() as caching:
        assert caching.call("HELLO", 3).type == "%"
        assert caching.call("CLIENT", "TRACKING", "ON").plain == b"OK"
        assert caching.call("GET", "job:max:a").plain == b"1.5"
        world.query.rows(1, ("a", 7, 70.5))
        assert caching.read().plain == [b"invalidate", [b"job:max:a"]]
        assert caching.call("GET", "job:max:a").plain == b"70.5"
        world.query.run = "second run"
        world.query.open(1)
        assert caching.read().plain == [b"invalidate", [b"job:max:a"]]
        assert caching.call("GET", "job:max:a").plain == b"1.5"


def test_facts_count_uncommitted_values(world: World) -> None:
    def fresh() -> list[Any]:
        facts = world.query.facts("job")
        return [facts[name] for name in ("fresh_keys", "fresh_batch", "fresh_incomplete")]

    assert fresh() == [0, None, 0]
    world.query.open(1)
    world.query.rows(1, ("a", 7, 70.5), ("new", 7, 70.5))
    assert fresh() == [4, 1, 0]
    described = world.call("STATE", "DESCRIBE", "job:max")
    assert described[described.index(b"fresh_keys") + 1] == 2
    assert b",fresh_keys=4,fresh_batch=1,fresh_age_ms=" in world.call("INFO", "sparkis")
    assert world.query.facts("job")["fresh_age_ms"] >= 0
    world.query.fresh("CLOSE", "job", world.query.run, 1, 0, 2, 1)
    assert fresh() == [4, 1, 1]
    world.query.commit(("a", 7, 70.5), ("new", 7, 70.5))
    assert fresh() == [0, None, 0]


@pytest.mark.compiled
def test_all_workers_of_port_show_rows_that_one_got(tmp_path: Path) -> None:
    with ExitStack() as stack:
        world = World(tmp_path, stack, "--workers", "2", is_pure=False)
        clients = [stack.enter_context(world.server.connect()) for _ in range(8)]
        world.query.open(1)
        world.query.rows(1, ("a", 7, 70.5))
        for client in clients:  # another worker hears of the first batch a moment later
            eventually(lambda client=client: client.call("GET", "job:max:a").plain, lambda found: found == b"70.5")
        world.query.rows(1, ("a", 8, 80.5))
        assert {client.call("GET", "job:max:a").plain for client in clients} == {b"80.5"}
        world.query.commit(("a", 8, 80.0))
        assert {client.call("GET", "job:max:a").plain for client in clients} <= {b"80.5", b"80"}


@pytest.mark.compiled
def test_proxy_forwards_uncommitted_values_and_invalidates_caches(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = [change for row in (("a", 1, 1.5), ("b", 2, 2.5)) for change in committed(*row)]
        nodes = PublishedNodes(tmp_path, stack, STATES, first)
        queries = [Query(stack.enter_context(server.connect()), nodes.writer) for server in nodes.servers]
        for query in queries:
            eventually(lambda query=query: query.facts("job").get("stale") == 0, awaited="a heartbeat")
            assert query.open(1) == b"OK"
        client = stack.enter_context(nodes.proxy.connect())
        caching = stack.enter_context(nodes.proxy.connect())
        keys = ("job:max:a", "job:max:b", "job:all:a")
        eventually(lambda: client.call("MGET", *keys[:2]).plain, lambda found: found == [b"1.5", b"2.5"])
        caching.call("HELLO", 3)
        caching.call("CLIENT", "TRACKING", "ON")
        assert caching.call("GET", "job:max:a").plain == b"1.5"
        for query in queries:  # each server keeps the rows of its own slots
            assert query.rows(1, ("a", 7, 70.5), ("b", 7, 71.5)) == b"OK"
        assert caching.read().plain == [b"invalidate", [b"job:max:a"]]
        assert client.call("MGET", *keys[:2]).plain == [b"70.5", b"71.5"]
        assert client.call("HGET", "job:all:a", "n").plain == b"7"
        assert client.call("STATE", "FRESH", "OPEN", "job", "r", 1, 0, SCHEMA).is_error
        assert client.call("STATE", "FRESHNESS", "COMMITTED").plain == b"OK"
        assert client.call("GET", keys[0]).plain == b"1.5"
        assert client.call("MGET", *keys[:2]).plain == [b"1.5", b"2.5"]
        assert client.call("HGET", "job:all:a", "n").plain == b"1"
        assert client.call_each("GET job:max:a", "GET job:max:b") == [b"1.5", b"2.5"]
        assert caching.call("GET", "job:max:a").plain == b"70.5"
        assert client.call("STATE", "FRESHNESS", "RECORD").plain == b"OK"
        assert client.call("MGET", *keys[:2]).plain == [b"70.5", b"71.5"]


@pytest.mark.compiled
def test_proxy_with_stores_reads_uncommitted_values_at_state_server(tmp_path: Path) -> None:
    with ExitStack() as stack:
        # The password of a state server is in its own environment only.
        stack.enter_context(pytest.MonkeyPatch.context()).setenv(STARTS, "yes")
        log = stack.enter_context(LogWriter(tmp_path / "log", "job", STATES))
        log.publish(committed("a", 1, 1.5))
        upstream = stack.enter_context(redis_server(tmp_path))
        options = ("--log", str(tmp_path / "log"), "--store", str(tmp_path / "store"))
        owners = ("--ownership", str(tmp_path / "owners"), "--upstream", f"redis://127.0.0.1:{upstream.port}")
        proxy = stack.enter_context(sparkis_program(PROGRAM, "--port", "0", *options, *owners))
        client = stack.enter_context(proxy.connect())
        eventually(lambda: client.call("GET", "job:max:a").plain, lambda found: found == b"1.5")
        state_server = StateServer(proxy, client)
        query = Query(state_server.connection, log)
        eventually(lambda: state_server.is_spared(client, "job:max:a"))
        eventually(lambda: query.facts("job").get("stale") == 0, awaited="a heartbeat")
        assert query.open(1) == b"OK"
        assert query.rows(1, ("a", 7, 70.5), ("new", 7, 7.5)) == b"OK"
        eventually(
            lambda: client.call("MGET", "job:max:a", "job:max:new").plain, lambda found: found == [b"70.5", b"7.5"]
        )
        assert query.rows(1, ("a", 8, 80.5)) == b"OK"
        assert client.call("GET", "job:max:a").plain == b"80.5"
        assert client.call("STATE", "FRESHNESS", "COMMITTED").plain == b"OK"
        assert client.call("MGET", "job:max:a", "job:max:new").plain == [b"1.5", None]
        assert client.call("GET", "job:max:a").plain == b"1.5"


def test_job_that_is_opened_again_keeps_values_beside_its_store(tmp_path: Path) -> None:
    keyspace = Keyspace()
    catalog = LocalJobCatalog(keyspace)
    for path in (tmp_path / "one", tmp_path / "two"):
        LmdbStore(path, "g").close()
        event = {"path": str(path), "generation": "g", "states": [], "is_incomplete": False, "renamed_from": None}
        catalog.serve(catalog.prepare("job", event))
        assert keyspace.jobs["job"].fresh is None
        fresh = FreshValues(folder_of(path, "server"), "g", 1 << 20)
        keyspace.show_fresh("job", fresh)
        catalog.serve(catalog.prepare("job", event))
        assert keyspace.jobs["job"].fresh is fresh


def test_mistakes_of_writer_are_named(world: World) -> None:
    query = world.query
    assert query.fresh("OPEN", "no", "r", 1, 0, SCHEMA) == "ERR no such job 'no'"
    assert query.rows(1, ("a", 1, 1.0)).startswith("ERR no batch of job 'job' is open here")
    assert "needs the column 'sensor'" in query.open(1, schema='{"type":"struct","fields":[]}')
    assert query.open(1) == b"OK"
    assert query.rows(2, ("a", 1, 1.0)) == (
        "ERR batch 2 of partition 0 was not opened here; send STATE FRESH OPEN first"
    )
    assert query.fresh("ROWS", "job", query.run, 1, 0, b"no rows").startswith("ERR")
    assert query.fresh("SHUT", "job", query.run, 1, 0, 1) == "ERR syntax error"
    assert query.fresh("CLOSE", "job", query.run, 1, 0, 5, 0) == b"OK"


def test_writer_may_write_only_job_that_its_user_may_read(world: World) -> None:
    world.call("ACL", "SETUSER", "writer", "on", "nopass", "~job:max:*", "+state|fresh")
    world.call("ACL", "SETUSER", "reader", "on", "nopass", "~*", "+@read")
    assert world.query.connection.call("AUTH", "writer", "x").plain == b"OK"
    assert world.query.open(1) == "NOPERM This needs a user that may read all keys of the job"
    world.call("ACL", "SETUSER", "writer", "~job:*")
    assert world.query.open(1) == b"OK"
    assert world.query.connection.call("AUTH", "reader", "x").plain == b"OK"
    assert world.query.open(1).startswith("NOPERM User reader has no permissions to run the 'state|fresh' command")
