"""Workers and their master are killed under load: values stay right, clients reconnect, and no process is left over."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from time import sleep

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from compat.conformance.servers import Running, sparkis_server
from compat.waiting import READ_PAUSE_S, eventually
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from tests.adversity.scene import Scene, children_of

pytestmark = pytest.mark.kill

ROUNDS = int(os.environ.get("SPARKIS_KILL_ROUNDS", "6"))
STATES = [StateDescriptor("n", key="k", value="v")]
KEYS = [f"job:n:{number}" for number in range(500)]
CLIENTS = 8


class Load:
    """Clients that read all the time, each on a connection of its own, and connect again when it breaks."""

    def __init__(self, port: int) -> None:
        self.broken: Counter[int] = Counter()
        self.answered: Counter[int] = Counter()
        self.wrongs: list[str] = []
        self._port = port
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []
        for _ in range(CLIENTS):
            self.add_client()

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self._threads)

    def add_client(self) -> None:
        """Start one more client."""
        self._threads.append(threading.Thread(target=self._run, args=[self.clients], daemon=True))
        self._threads[-1].start()

    def _run(self, number: int) -> None:
        chance = random.Random(number)
        # One connection and no pool, which would mend a connection that broke between two requests in silence.
        client = redis.Redis(
            port=self._port, decode_responses=True, retry=Retry(NoBackoff(), 0), single_connection_client=True
        )
        while not self._is_over.wait(READ_PAUSE_S):
            asked = chance.sample(range(len(KEYS)), 20)
            try:
                found = client.mget([KEYS[each] for each in asked])
            except redis.ConnectionError:
                self.broken[number] += 1
                sleep(0.01)
                continue
            if found != [str(each) for each in asked]:
                self.wrongs.append(f"{asked}: {found}")
            self.answered[number] += 1
        client.close()

    def wait_until_all_are_answered(self) -> None:
        """Wait until every client has asked, and has had an answer, since now."""
        before = Counter(self.answered)
        eventually(
            lambda: min(self.answered[each] - before[each] for each in range(self.clients)), lambda least: least > 1
        )

    def stop(self) -> None:
        """Stop; fail if any answer was wrong."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        assert not self.wrongs, self.wrongs[:3]


def publish(log: Path) -> None:
    """Write a log with one epoch."""
    with LogWriter(log, "job", STATES, "query") as writer:
        writer.publish([Change("n", Op.PUT, key.encode(), value=b"%d" % at) for at, key in enumerate(KEYS)], 0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    """Two workers."""
    publish(tmp_path / "log")
    with sparkis_server(tmp_path / "store", tmp_path / "log", "--workers", "2") as started:
        yield started


def workers_with_stores(server: Running) -> list[int]:
    """Return the workers that have opened what they are to show."""
    return list(filter(has_store, server.workers()))


def sockets_of(pid: int) -> int:
    """Return how many sockets a process holds."""
    return sum(os.readlink(link).startswith("socket:") for link in Path(f"/proc/{pid}/fd").iterdir())


def has_store(pid: int) -> bool:
    try:
        return any(os.readlink(link).endswith("data.mdb") for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def test_only_clients_of_killed_worker_notice_and_they_come_back(server: Running) -> None:
    chance = random.Random()
    for _ in range(ROUNDS):
        workers = eventually(lambda: workers_with_stores(server), lambda pids: len(pids) == 2)
        with redis.Redis(port=server.port) as client:
            eventually(lambda client=client: client.client_list(), lambda clients: len(clients) == 1)
            killed = chance.choice(workers)
            before = sockets_of(killed)
            load = Load(server.port)
            load.wait_until_all_are_answered()
            while not 0 < (its_clients := sockets_of(killed) - before) < load.clients:
                load.add_client()  # the kernel chooses the worker of a connection, by chance the same for all
                load.wait_until_all_are_answered()
            os.kill(killed, signal.SIGKILL)
        load.wait_until_all_are_answered()
        eventually(lambda: workers_with_stores(server), lambda pids: len(pids) == 2)
        load.stop()
        assert len(load.broken) == its_clients


def test_server_of_killed_master_leaves_nothing(scene: Scene) -> None:
    publish(scene.log)
    server = scene.start_server(workers=2)
    load = Load(scene.port)
    load.wait_until_all_are_answered()
    left = [pid for word in ("programs.worker", "applier") for pid in children_of(server.popen.pid, word)]
    assert len(left) == 3
    server.popen.kill()  # the master alone
    server.popen.wait()
    eventually(lambda: [pid for pid in left if is_running(pid)], lambda pids: not pids)
    scene.start_server(workers=2)
    load.wait_until_all_are_answered()
    load.stop()


def is_running(pid: int) -> bool:
    """Return whether a process is there, and is more than an entry in the table."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
