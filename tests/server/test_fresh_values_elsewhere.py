"""Values that are not committed yet, after restarts and kills, at replicas, and in slots that move."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from compat.conformance.servers import Running, sparkis_program, sparkis_server
from compat.waiting import eventually
from state_backend.log.log_writer import LogWriter
from state_backend.model.records import Change, Op
from state_backend.model.slots import slot_of
from tests.server.fresh_rows import STATES, Query, World, committed
from tests.server.nodes import HALVES, Nodes

# Keys of the first and of the second half of the slots.
ONE, OTHER = b"job:max:a", b"job:max:b"
ALL = {"slots": "0-16383"}
# More than the free pages for which the store of an idle job is copied.
FREED_BYTES = 8 << 20


def begin_query(server: Running, log: LogWriter, stack: ExitStack, batch: int = 1) -> Query:
    """Open a batch at a server."""
    query = Query(stack.enter_context(server.connect()), log)
    eventually(lambda: query.facts("job").get("stale"), lambda stale: stale == 0, "a heartbeat")
    assert query.open(batch) == b"OK"
    return query


def first_epoch(log: Path, stack: ExitStack) -> LogWriter:
    writer = stack.enter_context(LogWriter(log, "job", STATES))
    writer.publish([change for row in (("a", 1, 1.5), ("b", 2, 2.5)) for change in committed(*row)])
    return writer


def test_server_that_starts_again_shows_committed_values_until_batch_is_opened(tmp_path: Path) -> None:
    with ExitStack() as stack:
        log = first_epoch(tmp_path / "log", stack)
        with sparkis_server(tmp_path / "store", tmp_path / "log") as server, ExitStack() as clients:
            query = begin_query(server, log, clients)
            assert query.rows(1, ("a", 7, 70.5)) == b"OK"
            assert query.connection.call("GET", ONE).plain == b"70.5"
            server.process.kill()
        server = stack.enter_context(sparkis_server(tmp_path / "store", tmp_path / "log"))
        again = Query(stack.enter_context(server.connect()), log)
        assert again.connection.call("GET", ONE).plain == b"1.5"
        eventually(lambda: again.facts("job").get("stale"), lambda stale: stale == 0, "a heartbeat")
        assert again.rows(1, ("a", 8, 80.5)).startswith("ERR no batch of job 'job' is open here")
        again = begin_query(server, log, stack)
        assert again.rows(1, ("a", 8, 80.5)) == b"OK"
        assert again.connection.call("MGET", ONE, OTHER).plain == [b"80.5", b"2.5"]


def free_pages(log: LogWriter, stack: ExitStack) -> LogWriter:
    """Leave so many free pages in the job's store that it is copied without them."""
    keys = [f"job:note:{number}".encode() for number in range(FREED_BYTES >> 10)]
    log.publish([Change("note", Op.PUT, key, value=os.urandom(1 << 10)) for key in keys])
    log.publish([Change("note", Op.DELETE, key) for key in keys])
    return log


def begin_generation(log: LogWriter, stack: ExitStack) -> LogWriter:
    """Begin a generation of the job, whose store is made anew."""
    log.close()
    again = stack.enter_context(LogWriter(log.log.filesystem.root, "job", STATES, query_id="another"))
    again.publish(committed("a", 1, 1.5))
    return again


@pytest.mark.parametrize("replace", [free_pages, begin_generation])
def test_store_that_is_replaced_shows_committed_values_until_batch_is_opened(
    tmp_path: Path, replace: Callable[[LogWriter, ExitStack], LogWriter]
) -> None:
    with ExitStack() as stack:
        log = first_epoch(tmp_path / "log", stack)
        server = stack.enter_context(sparkis_server(tmp_path / "store", tmp_path / "log"))
        query = begin_query(server, log, stack, batch=9)
        assert query.rows(9, ("a", 7, 70.5)) == b"OK"
        assert query.connection.call("GET", ONE).plain == b"70.5"
        log = replace(log, stack)
        eventually(
            lambda: query.rows(9, ("a", 8, 80.5)),
            lambda reply: reply != b"OK" and reply.startswith("ERR no batch of job 'job' is open here"),
            awaited="another store",
        )
        assert query.connection.call("GET", ONE).plain == b"1.5"
        query = begin_query(server, log, stack, batch=9)
        assert query.rows(9, ("a", 9, 90.5)) == b"OK"
        assert query.connection.call("GET", ONE).plain == b"90.5"


@pytest.mark.compiled
@pytest.mark.kill
def test_worker_that_is_started_again_shows_committed_values_until_batch_is_opened(tmp_path: Path) -> None:
    with ExitStack() as stack:
        world = World(tmp_path, stack, "--workers", "2", is_pure=False)

        def seen() -> set[Any]:
            """Read the key at all workers: the kernel spreads new connections."""
            with ExitStack() as clients:
                connections = [clients.enter_context(world.server.connect()) for _ in range(8)]
                return {connection.call("GET", ONE).plain for connection in connections}

        assert world.query.open(1) == b"OK"
        assert world.query.rows(1, ("a", 7, 70.5)) == b"OK"
        eventually(seen, lambda found: found == {b"70.5"})
        workers = world.server.workers()
        os.kill(workers[0], signal.SIGKILL)
        eventually(lambda: {*world.server.workers()} - {workers[0]}, lambda found: len(found) == len(workers))
        query = Query(stack.enter_context(world.server.connect()), world.query._log)
        assert eventually(seen, lambda found: found <= {b"1.5", b"70.5"})
        assert query.open(2) == b"OK"
        assert query.rows(2, ("a", 8, 80.5)) == b"OK"
        eventually(seen, lambda found: found == {b"80.5"})


@pytest.mark.compiled
def test_replica_has_rows_that_it_got_and_answers_for_its_killed_master(tmp_path: Path) -> None:
    with ExitStack() as stack:
        nodes = Nodes(tmp_path, stack, ALL, {"replica_of": "first"})
        log = first_epoch(nodes.log, stack)
        master, replica = nodes.start(0), nodes.start(1)
        proxy = nodes.start_proxy()
        queries = [begin_query(server, log, stack) for server in (master, replica)]
        for query in queries:
            assert query.rows(1, ("a", 7, 70.5)) == b"OK"
        at_replica, client = (stack.enter_context(each.connect()) for each in (replica, proxy))
        at_replica.call("READONLY")
        assert at_replica.call("GET", ONE).plain == b"70.5"
        eventually(lambda: client.call("GET", ONE).plain, lambda found: found == b"70.5")
        master.process.kill()
        assert queries[1].rows(1, ("a", 8, 80.5)) == b"OK"
        eventually(lambda: client.call("GET", ONE).plain, lambda found: found == b"80.5")
        assert client.call("STATE", "FRESHNESS", "COMMITTED").plain == b"OK"
        eventually(lambda: client.call("GET", ONE).plain, lambda found: found == b"1.5")


@pytest.mark.compiled
def test_new_owner_of_slot_shows_rows_that_all_nodes_got(tmp_path: Path) -> None:
    with ExitStack() as stack:
        nodes = Nodes(tmp_path, stack, *HALVES)
        log = first_epoch(nodes.log, stack)
        servers = [nodes.start(0), nodes.start(1)]
        proxy = nodes.start_proxy()
        queries = [begin_query(server, log, stack) for server in servers]
        client = stack.enter_context(proxy.connect())

        def send(n: int) -> None:
            for query in queries:
                assert query.rows(1, ("a", n, n + 0.5), ("b", n, n + 0.25)) == b"OK"

        def shows(*values: bytes) -> None:
            eventually(lambda: client.call("MGET", ONE, OTHER).plain, lambda found: found == [*values])

        def move(*rows: dict[str, str]) -> None:
            nodes.write_topology(*rows)
            for query in queries:
                nodes.wait_for_slots(query.connection)

        send(7)
        shows(b"7.5", b"7.25")
        moved = slot_of(OTHER)
        move({"slots": f"0-8191,{moved}-{moved}"}, {"slots": f"8192-{moved - 1},{moved + 1}-16383"})
        shows(b"7.5", b"7.25")
        send(8)
        shows(b"8.5", b"8.25")
        move(*HALVES)
        shows(b"8.5", b"8.25")
        send(9)
        shows(b"9.5", b"9.25")
        log.publish([change for row in (("a", 9, 9.5), ("b", 9, 9.25)) for change in committed(*row)])
        eventually(lambda: [query.facts("job")["fresh_keys"] for query in queries], lambda found: found == [0, 0])
        shows(b"9.5", b"9.25")


@pytest.mark.kill
def test_state_servers_show_rows_that_they_got_for_their_own_slots(tmp_path: Path) -> None:
    with ExitStack() as stack:
        log = first_epoch(tmp_path / "log", stack)
        options = ("--log", str(tmp_path / "log"), "--port", "0")
        stack.enter_context(sparkis_program(("-m", "resp_server.programs.registry"), *options))

        def state_server(name: str) -> Running:
            given = (*options, "--bind", "127.0.0.1", "--store", str(tmp_path / name))
            return stack.enter_context(sparkis_program(("-m", "resp_server.programs.state_server"), *given))

        def shows(query: Query, key: bytes, awaited: bytes) -> None:
            eventually(lambda: query.connection.call("GET", key).plain, lambda found: found.startswith(awaited))

        first = begin_query(state_server("first"), log, stack)
        assert first.rows(1, ("a", 7, 7.5), ("b", 7, 7.25)) == b"OK"
        shows(first, OTHER, b"7.25")
        server = state_server("second")  # gets the second half of the slots
        second = Query(stack.enter_context(server.connect()), log)
        shows(second, OTHER, b"2.5")
        shows(first, OTHER, b"MOVED")
        assert begin_query(server, log, stack).open(1) == b"OK"
        for query in (first, second):
            assert query.rows(1, ("a", 8, 8.5), ("b", 8, 8.25)) == b"OK"
        shows(second, OTHER, b"8.25")
        shows(first, ONE, b"8.5")
        assert second.facts("job")["fresh_keys"] == 2  # the value and the hash of its own slots
        server.process.kill()
        eventually(lambda: first.connection.call("GET", OTHER).plain, lambda found: not found.startswith(b"MOVED"))
        assert first.rows(1, ("a", 9, 9.5)) == b"OK"
        shows(first, ONE, b"9.5")
        # Not the row that it got before the slots went; 8.25 came while it still had them.
        assert first.connection.call("GET", OTHER).plain in (b"2.5", b"8.25")
        assert first.rows(1, ("b", 9, 9.25)) == b"OK"
        shows(first, OTHER, b"9.25")
