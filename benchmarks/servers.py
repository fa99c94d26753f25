"""The two servers of a read benchmark, with the same data and the same changes: ours from a log, and a redis-server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from random import Random

from resp_server.client import Client
from state_backend import packed_map
from state_backend.descriptor import StateDescriptor
from state_backend.log_writer import LogWriter
from state_backend.records import Change, Op

JOB, STATE, MAP_STATE = "bench", "value", "map"
MAPS = 10_000
FIELDS = 10
START_TIMEOUT_S = 60.0
CHANGED_SHARE = 0.01
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def key(number: int, state: str = STATE) -> str:
    """Return a key as redis-benchmark makes it from `bench:value:__rand_int__`."""
    return f"{JOB}:{state}:{number:012d}"


def value(number: int, turn: int) -> str:
    """Return a key's value after its last change: it tells the key, so that a wrong reply shows."""
    return f"{number}:{turn:010d}"


def fields(number: int) -> dict[str, str]:
    """Return the fields of a map."""
    return {f"field{each}": value(number, each) for each in range(FIELDS)}


class Served(ABC):
    """A server with `keys` keys, of which one in a hundred changes every second while `changes` runs."""

    name: str
    port: int
    process: subprocess.Popen[bytes]

    def __init__(self, keys: int) -> None:
        self.keys = keys
        self._turn = 0
        self._is_changing = threading.Event()
        self._ends = threading.Event()

    @abstractmethod
    def put(self, numbers: list[int]) -> None:
        """Give these keys the value of the next turn."""

    def start_changes(self) -> None:
        """Change one key in a hundred, once a second, in a thread of this process, until `stop`; paused at first."""
        threading.Thread(target=self._change, daemon=True).start()

    def _change(self) -> None:
        random = Random(1)
        while not self._ends.is_set():
            self._is_changing.wait()
            started_s = time.monotonic()
            self.put(random.sample(range(self.keys), max(1, int(self.keys * CHANGED_SHARE))))
            self._ends.wait(max(0.0, 1.0 - (time.monotonic() - started_s)))

    def pause(self, is_paused: bool) -> None:
        """Stop, or go on with, the changes: a server is not changed while the other one is measured."""
        if is_paused:
            self._is_changing.clear()
        else:
            self._is_changing.set()

    def cpu_s(self) -> float:
        """Return the processor time that the server process has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS_PER_S

    def calls(self, command: str) -> int:
        """Return how many calls of a command the server has counted."""
        with Client("127.0.0.1", self.port) as client:
            lines = str(client.call("INFO", "commandstats")).splitlines()
        stats = dict(line.split(":", 1) for line in lines if line.startswith("cmdstat_"))
        found = stats.get(f"cmdstat_{command}", "calls=0")
        return int(found.partition("calls=")[2].partition(",")[0])

    def check_sample(self, random: Random) -> None:
        """Read some keys and refuse a reply that is not a value of its key."""
        with Client("127.0.0.1", self.port) as client:
            for number in random.sample(range(self.keys), 200):
                found = client.call("GET", key(number))
                if not str(found).startswith(f"{number}:"):
                    raise SystemExit(f"{self.name} answered {found!r} for {key(number)}: the benchmark is void")
            number = random.randrange(MAPS)
            if client.call("HGETALL", key(number, MAP_STATE)) != [w for pair in fields(number).items() for w in pair]:
                raise SystemExit(f"{self.name} holds another map at {key(number, MAP_STATE)}: the benchmark is void")

    def stop(self) -> None:
        """End the server."""
        self._ends.set()
        self._is_changing.set()
        self.process.terminate()
        self.process.wait(10)


class Sparkis(Served):
    """Our server, following a log that this process writes."""

    name = "sparkis"

    def __init__(self, keys: int, folder: Path) -> None:
        super().__init__(keys)
        log = folder / "log"
        states = [
            StateDescriptor(STATE, key="key", value="value"),
            StateDescriptor(MAP_STATE, key="key", value=tuple(fields(0))),
        ]
        self._writer = LogWriter(log, JOB, states)
        self.put(list(range(keys)))
        self._writer.publish([self._map_change(number) for number in range(MAPS)])
        command = [sys.executable, "-m", "resp_server.process", "--child", "--log", str(log), "--port", "0"]
        command += ["--store", str(folder / "store"), "--loglevel", "error"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.port = json.loads(self.process.stdout.readline())["port"]
        self._wait_until_loaded()

    @staticmethod
    def _map_change(number: int) -> Change:
        packed = packed_map.pack((name.encode(), text.encode()) for name, text in fields(number).items())
        return Change(MAP_STATE, Op.PUT, key(number, MAP_STATE).encode(), value=packed)

    def _wait_until_loaded(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        with Client("127.0.0.1", self.port) as client:
            while client.call("DBSIZE") < self.keys + MAPS:
                if time.monotonic() > deadline:
                    raise SystemExit("the server did not load its data in time")
                time.sleep(0.1)

    def put(self, numbers: list[int]) -> None:
        changes = [
            Change(STATE, Op.PUT, key(number).encode(), value=value(number, self._turn).encode()) for number in numbers
        ]
        self._writer.publish(changes)
        self._writer.beat()
        self._turn += 1


class RedisServer(Served):
    """Debian's redis-server with nothing but memory."""

    name = "redis-server"

    def __init__(self, keys: int, folder: Path) -> None:
        super().__init__(keys)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        self.process = subprocess.Popen([*command, "--daemonize", "no"], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_TIMEOUT_S
        while socket.socket().connect_ex(("127.0.0.1", self.port)):
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise SystemExit("redis-server did not start")
            time.sleep(0.05)
        self.put(list(range(keys)))
        with Client("127.0.0.1", self.port) as client:
            for number in range(MAPS):
                client.call("HSET", key(number, MAP_STATE), *(w for pair in fields(number).items() for w in pair))

    def put(self, numbers: list[int]) -> None:
        with Client("127.0.0.1", self.port) as client:
            for start in range(0, len(numbers), 1000):
                pairs = [(key(number), value(number, self._turn)) for number in numbers[start : start + 1000]]
                client.call("MSET", *(word for pair in pairs for word in pair))
        self._turn += 1


def start_both(keys: int) -> tuple[Sparkis, RedisServer, tempfile.TemporaryDirectory[str]]:
    """Start both servers with the same keys; the folder goes when it is cleaned up."""
    folder = tempfile.TemporaryDirectory(prefix="sparkis-bench-")
    path = Path(folder.name)
    return Sparkis(keys, path), RedisServer(keys, path), folder
