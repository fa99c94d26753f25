"""Two serving processes that share a port: one server to its clients, whichever of them answers."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from compat.conformance.judge import client_lines, info_fields
from compat.conformance.servers import CONTROL_TOKEN, Running, sparkis_server
from compat.conformance.wire import Connection, request
from compat.waiting import READ_PAUSE_S, WAIT_S_MAX, eventually
from resp_server.net.client import Client
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from tests.builders import write_log

Found = TypeVar("Found")

JOB = "job"
STATES = [StateDescriptor("n", key="k", value="v"), StateDescriptor("filling", key="k", value="v")]
MARKERS = [f"job:n:{number}" for number in range(4)]
WORKERS = 2


def markers(count: int) -> list[Change]:
    """Return an epoch that gives every marker a number."""
    return [Change("n", Op.PUT, marker.encode(), value=b"%d" % count) for marker in MARKERS]


def control(server: Running) -> Client:
    """Connect to a server's control listener."""
    return Client("127.0.0.1", server.control_port, password=CONTROL_TOKEN, timeout_s=WAIT_S_MAX)


def log_of_one_epoch(folder: Path) -> Path:
    write_log(folder / "log", JOB, STATES, markers(0), query_id="first")
    return folder / "log"


def start_server(stack: ExitStack, folder: Path, log: Path, *options: str, **given: Any) -> Running:
    """Start a server with two workers, and with further options, that ends with the stack."""
    # Who asks whether it has loaded its log is no client: their numbers are looked at.
    given_all = folder / "store", log, "--workers", str(WORKERS), *options
    server = stack.enter_context(sparkis_server(*given_all, is_loaded=False, **given))
    with control(server) as asking:
        assert asking.call("WAIT", JOB, "0", "300000", timeout_s=WAIT_S_MAX) == 1
    return server


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log with one epoch."""
    return log_of_one_epoch(tmp_path)


@pytest.fixture
def serve(tmp_path: Path, log: Path) -> Iterator[Callable[..., Running]]:
    """Start a server that ends with the test."""
    with ExitStack() as stack:
        yield partial(start_server, stack, tmp_path, log)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server for tests that end no process of it and publish nothing."""
    folder = tmp_path_factory.mktemp("shared")
    with ExitStack() as stack:
        yield start_server(stack, folder, log_of_one_epoch(folder))


@pytest.fixture
def first(shared: Running, connect: Callable[[Running], Connection]) -> Connection:
    """Connect to the shared server, and wait until all clients of earlier tests are gone."""
    connection = connect(shared)
    eventually(lambda: client_lines(connection.call("CLIENT", "LIST")), lambda lines: len(lines) == 1)
    return connection


@pytest.fixture
def connect() -> Iterator[Callable[[Running], Connection]]:
    """Open connections that are closed with the test."""
    with ExitStack() as stack:
        yield lambda server: stack.enter_context(Connection(server.port))


Serve = Callable[..., Running]
Connect = Callable[[Running], Connection]


def is_alive(connection: Connection) -> bool:
    """Return whether a connection is still there."""
    try:
        connection.send(request("PING"))
        return connection.read().raw == b"+PONG\r\n"
    except (OSError, EOFError):
        return False


def read_once(server: Running) -> bytes | None:
    """Read a marker on a new connection; None if it was handed to a worker that had just been killed."""
    try:
        with Connection(server.port) as connection:
            return bytes(connection.call("GET", MARKERS[0]).value)
    except (OSError, EOFError):
        return None


# Clients --------------------------------------------------------------------------------------------------------------


def test_connections_are_spread_evenly_and_dead_worker_loses_its_own_only(serve: Serve, connect: Connect) -> None:
    server = serve()
    connections = [connect(server) for _ in range(10)]
    assert all(each.call("GET", MARKERS[0]).value == b"0" for each in connections)
    first, second = server.workers()
    os.kill(first, signal.SIGKILL)
    assert [is_alive(each) for each in connections].count(True) == 5
    workers = eventually(lambda: server.workers(), lambda pids: len(pids) == 2)
    assert second in workers
    assert first not in workers


def test_ids_are_unique_and_grow_over_all_workers(shared: Running, first: Connection, connect: Connect) -> None:
    ids = [id_of(each) for each in (first, *(connect(shared) for _ in range(8)))]
    assert ids == list(range(ids[0], ids[0] + 9))


def id_of(connection: Connection) -> int:
    return int(connection.call("CLIENT", "ID").value)


def test_client_list_has_clients_of_all_workers(shared: Running, first: Connection, connect: Connect) -> None:
    connections = [first, *(connect(shared) for _ in range(5))]
    ids = [str(id_of(each)) for each in connections]
    absent = str(id_of(first) + 99)
    for number, each in enumerate(connections):
        each.call("CLIENT", "SETNAME", f"name-{number}")
    for each in connections:
        lines = client_lines(each.call("CLIENT", "LIST"))
        assert [(line["id"], line["name"]) for line in lines] == [(ids[n], f"name-{n}") for n in range(6)]
        assert [line["id"] for line in client_lines(each.call("CLIENT", "LIST", "TYPE", "normal"))] == ids
        assert client_lines(each.call("CLIENT", "LIST", "TYPE", "pubsub")) == []
        given = (ids[4], absent, ids[1], ids[4])
        assert [line["id"] for line in client_lines(each.call("CLIENT", "LIST", "ID", *given))] == [
            ids[4],
            ids[1],
            ids[4],
        ]
    assert client_lines(connections[3].call("CLIENT", "INFO"))[0]["name"] == "name-3"


def test_client_can_be_killed_from_another_worker(shared: Running, first: Connection, connect: Connect) -> None:
    killer, (second, third, fourth, fifth) = first, (connect(shared) for _ in range(4))
    address = client_lines(fourth.call("CLIENT", "INFO"))[0]["addr"]
    id_killed = str(id_of(second))
    assert killer.call("CLIENT", "KILL", "ID", id_killed).value == 1
    assert killer.call("CLIENT", "KILL", "ID", id_killed).value == 0
    assert killer.call("CLIENT", "KILL", address).raw == b"+OK\r\n"
    assert killer.call("CLIENT", "KILL", address).raw == b"-ERR No such client\r\n"
    assert [is_alive(each) for each in (second, third, fourth, fifth)] == [False, True, False, True]
    assert killer.call("CLIENT", "KILL", "TYPE", "normal").value == 2
    assert killer.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "no").value == 1
    assert not is_alive(killer)


def test_requests_behind_one_that_asks_all_workers_are_answered_after_it(first: Connection) -> None:
    first.send(
        request("GET", MARKERS[0]) + request("CLIENT", "LIST") + request("ECHO", "a") + request("CLIENT", "KILL", "x:1")
    )
    replies = [first.read() for _ in range(4)]
    assert [reply.raw for reply in (replies[0], *replies[2:])] == [
        b"$1\r\n0\r\n",
        b"$1\r\na\r\n",
        b"-ERR No such client\r\n",
    ]
    assert len(client_lines(replies[1])) == 1


def test_client_limit_counts_clients_of_all_workers(serve: Serve, connect: Connect) -> None:
    server = serve("--maxclients", "3")
    connections = [connect(server) for _ in range(3)]
    assert all(is_alive(each) for each in connections)
    assert connect(server).read_to_end() == b"-ERR max number of clients reached\r\n"
    assert info(connections[0])["rejected_connections"] == "1"
    assert connections[0].call("CLIENT", "KILL", "ID", "2").value == 1
    eventually(lambda: is_alive(connect(server)), bool)


def info(connection: Connection) -> dict[str, str]:
    return info_fields(connection.call("INFO", "everything"))


def test_info_adds_workers_up(serve: Serve, connect: Connect) -> None:
    server = serve()
    connections = [connect(server) for _ in range(5)]
    for number, each in enumerate(connections):
        for _ in range(10 + number):
            assert each.call("GET", MARKERS[0]).value == b"0"
        each.call("GET", "job:n:none")
        each.call("GET", MARKERS[0], "too", "many")
    for each in connections:
        found = info(each)
        assert found["connected_clients"] == "5"
        assert found["total_connections_received"] == "5"
        assert found["cmdstat_get"].startswith("calls=65,")
        assert ",rejected_calls=5," in found["cmdstat_get"]
        assert (found["keyspace_hits"], found["keyspace_misses"]) == ("60", "5")
        assert found["errorstat_ERR"] == "count=5"
        assert found["total_error_replies"] == "5"
        assert found["process_id"] == str(server.process.pid)
        assert found["tcp_port"] == str(server.port)
    assert len({info(each)["run_id"] for each in connections}) == 1
    memory, cpu = (int(found["used_memory_rss"]), float(found["used_cpu_user"]))
    pids = [*server.workers(), server.process.pid]
    assert memory > max(resident_bytes(pid) for pid in pids)
    assert cpu > max(user_s(pid) for pid in server.workers())


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def user_s(pid: int) -> float:
    """Return what a process used when INFO was asked, or less: it is read before."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return 0.5 * int(fields[11]) / os.sysconf("SC_CLK_TCK")


def test_worker_that_does_not_answer_is_left_out(shared: Running, first: Connection, connect: Connect) -> None:
    connections = [first, *(connect(shared) for _ in range(3))]
    ids = [str(id_of(each)) for each in connections]
    stopped = shared.workers()[0]
    os.kill(stopped, signal.SIGSTOP)
    try:
        for each in connections[:2]:
            each.send(request("PING"))
        (answered,), _, _ = select.select(connections[:2], [], [], WAIT_S_MAX)
        assert answered.read().raw == b"+PONG\r\n"
        own = ids[::2] if answered is connections[0] else ids[1::2]
        assert [line["id"] for line in client_lines(answered.call("CLIENT", "LIST"))] == own
        assert answered.call("GET", MARKERS[0]).value == b"0"
    finally:
        os.kill(stopped, signal.SIGCONT)
    eventually(lambda: len(client_lines(answered.call("CLIENT", "LIST"))), lambda count: count == 4)


# What is shown --------------------------------------------------------------------------------------------------------


class Readers:
    """Clients that ask one worker and another: some come back again and again, some have several connections.

    They write down what must not be.
    """

    def __init__(self, server: Running) -> None:
        self.seen: Counter[int] = Counter()
        self.wrongs: list[str] = []
        self._port = server.port
        self._newest = -1
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=[run], daemon=True)
            for run in 2 * [self._come_back, self._alternate]
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, run: Callable[[], None]) -> None:
        try:
            run()
        except (OSError, EOFError) as error:
            self.wrongs.append(repr(error))

    def _come_back(self) -> None:
        while not self._is_over.wait(READ_PAUSE_S):
            with Connection(self._port) as connection:
                self._look(connection)

    def _alternate(self) -> None:
        with ExitStack() as stack:
            connections = [stack.enter_context(Connection(self._port)) for _ in range(2 * WORKERS)]
            while not self._is_over.wait(READ_PAUSE_S):
                for each in connections:
                    self._look(each)

    def _look(self, connection: Connection) -> None:
        before = self._newest  # what somebody saw before this request
        values = {each.value for each in connection.call("MGET", *MARKERS).value}
        if len(values) != 1 or None in values:
            self.wrongs.append(f"torn: {values}")
            return
        (value,) = map(int, values)
        if value < before:
            self.wrongs.append(f"back from {before} to {value}")
        self._newest = max(self._newest, value)
        self.seen[value] += 1

    def stop(self) -> None:
        """End; fail if anything was wrong."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        assert not self.wrongs, self.wrongs[:3]


def publish(writer: LogWriter, server: Running, changes: Sequence[Change], epoch: int) -> None:
    """Publish an epoch and wait until it can be read by all workers."""
    writer.publish(list(changes), epoch)
    with control(server) as client:
        client.call("NOTICE", JOB, str(epoch))
        assert client.call("WAIT", JOB, str(epoch), "300000", timeout_s=WAIT_S_MAX) == 1


def test_epoch_that_was_waited_for_can_be_read_from_every_worker(serve: Serve, log: Path) -> None:
    server = serve()
    with LogWriter(log, JOB, STATES, "first") as writer:
        for epoch in range(1, 30):
            publish(writer, server, markers(epoch), epoch)
            for _ in range(2 * WORKERS):
                with Connection(server.port) as connection:
                    assert connection.call("GET", MARKERS[0]).value == b"%d" % epoch


def test_wait_for_missing_epoch_times_out(shared: Running) -> None:
    with control(shared) as client:
        assert client.call("WAIT", JOB, "0", "300000", timeout_s=WAIT_S_MAX) == 1
        assert client.call("WAIT", JOB, "1", "50") == 0
        assert client.call("WAIT", "nobody", "0", "50") == 0


# A master whose line to every second worker is slow: what it tells comes there later than to the other.
SLOW_LINE = """
import asyncio, sys
from resp_server.programs import serve as process
from resp_server.workers import master

class SlowChannel(master.Channel):
    made = 0

    def __init__(self, *given):
        super().__init__(*given)
        SlowChannel.made += 1
        self.is_slow = SlowChannel.made % 2 == 0

    def send(self, *given):
        if self.is_slow:
            asyncio.get_running_loop().call_later(0.05, super().send, *given)
        else:
            super().send(*given)

master.Channel = SlowChannel
sys.exit(process.main(sys.argv[1:]))
"""


def test_no_connection_shows_older_epoch_than_before(serve: Serve, log: Path) -> None:
    """Whatever worker they come to, while stores are exchanged for others: compacted ones and those of new queries."""
    server = serve(program=["-c", SLOW_LINE])
    readers = Readers(server)
    number = 0

    def go_on(writer: LogWriter, *changes: Change) -> None:
        """Publish the next number, and further changes, and wait until a reader saw it."""
        nonlocal number
        number += 1
        publish(writer, server, [*markers(number), *changes], writer.last.epoch + 1 if writer.last else 0)
        eventually(lambda: readers.seen[number], bool)

    for query in ("first", "second", "third", "fourth"):
        with LogWriter(log, JOB, STATES, query) as writer:
            for _ in range(5):
                go_on(writer)
    before = stores_of(server)
    filling = [b"job:filling:%d" % each for each in range(100)]
    with LogWriter(log, JOB, STATES, "fourth") as writer:
        go_on(writer, *(Change("filling", Op.PUT, key, value=bytes(1 << 20)) for key in filling))
        go_on(writer, *(Change("filling", Op.DELETE, key) for key in filling))
        while before & stores_of(server):  # until the applier has seen how many free pages there are
            go_on(writer)
        for _ in range(5):
            go_on(writer)
    readers.stop()
    assert set(range(1, number + 1)) <= readers.seen.keys()


def stores_of(server: Running) -> set[str]:
    """Return the folders of the stores that a server's workers have open."""
    links = [link for pid in server.workers() for link in Path(f"/proc/{pid}/fd").iterdir()]
    return {target for link in links if (target := _target(link)).endswith("data.mdb")}


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def test_later_worker_shows_epochs_of_others(serve: Serve, log: Path) -> None:
    server = serve()
    with LogWriter(log, JOB, STATES, "second") as writer:
        publish(writer, server, markers(7), 0)
    for pid in server.workers():
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: read_once(server), lambda reply: reply is not None) == b"7"
    eventually(lambda: server.workers(), lambda pids: len(pids) == WORKERS)
    with LogWriter(log, JOB, STATES, "second") as writer:
        publish(writer, server, markers(8), 1)
    for _ in range(2 * WORKERS):
        with Connection(server.port) as connection:
            assert connection.call("GET", MARKERS[0]).value == b"8"


@pytest.mark.parametrize("workers", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_keys_are_loading_while_job_is_being_opened(tmp_path: Path, log: Path, workers: str) -> None:
    """The applier waits for the lock of the job's stores, as after a server that died in the midst of an epoch."""
    folder = tmp_path / "store" / JOB
    folder.mkdir(parents=True)
    with open(folder / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with sparkis_server(tmp_path / "store", log, "--workers", workers, is_loaded=False) as server:
            loading = b"-LOADING Redis is loading the dataset in memory\r\n"
            for _ in range(2):
                with Connection(server.port) as connection:
                    assert connection.call("GET", MARKERS[0]).raw == loading
                    assert info(connection)["loading"] == "1"
            fcntl.flock(lock, fcntl.LOCK_UN)
            for _ in range(2):
                with Connection(server.port) as connection:
                    eventually(lambda: connection.call("GET", MARKERS[0]).raw, lambda raw: raw != loading)
                    assert connection.call("GET", MARKERS[0]).value == b"0"
                    assert info(connection)["loading"] == "0"


# Its beginning and its end ----------------------------------------------------------------------------------------


def test_two_servers_on_one_port_are_one_too_many(shared: Running, tmp_path: Path, log: Path) -> None:
    port = str(shared.port)
    command = [
        sys.executable,
        "-m",
        "resp_server.programs.serve",
        "--log",
        str(log),
        "--store",
        str(tmp_path / "other"),
    ]
    ended = subprocess.run(
        [*command, "--port", port, "--workers", "2"], capture_output=True, text=True, timeout=WAIT_S_MAX
    )
    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1, port {port}: Address already in use" in ended.stderr


@pytest.mark.parametrize("count", ["0", "-1", "two", "65"])
def test_impossible_number_of_workers_is_refused(log: Path, count: str) -> None:
    command = [sys.executable, "-m", "resp_server.programs.serve", "--log", str(log), f"--workers={count}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S_MAX)
    assert ended.returncode == 2
    assert "is not a number of processes from 1 to 64" in ended.stderr


def test_server_with_sigterm_ends_its_workers(serve: Serve, connect: Connect) -> None:
    server = serve()
    connection = connect(server)
    assert is_alive(connection)
    workers = server.workers()
    server.process.terminate()
    assert server.process.wait(WAIT_S_MAX) == 0
    assert not is_alive(connection)
    assert [pid for pid in workers if Path(f"/proc/{pid}").exists()] == []
