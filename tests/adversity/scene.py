"""A job under adversity: its input, its processes, and its expected state."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from time import sleep
from typing import Any, TypeVar

import redis

from benchmarks import processes
from compat.conformance.servers import free_port
from compat.waiting import READ_PAUSE_S, eventually
from state_backend.log.change_log import ChangeLog
from tests.adversity.driver import JOB, Orders

Found = TypeVar("Found")

HERE = Path(__file__).parent
# Each file names every marker once: their counts are the number of files, in every whole epoch.
MARKERS = [f"marker{number}" for number in range(8)]
KEYS_PER_FILE = 20
KEYS = [f"k{number}" for number in range(60)]


class Process:
    """A driver or a server that this test started, with its children."""

    def __init__(self, command: list[str]) -> None:
        self.events: list[dict[str, Any]] = []
        self.popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            if line.startswith("{"):
                self.events.append(json.loads(line))

    def wait_for(self, event: str) -> Any:
        """Wait for an event of this process and return its value."""

        def look() -> list[Any]:
            is_over = self.popen.poll() is not None
            if is_over:
                self._reading.join(5)
            found = [each[event] for each in self.events if event in each]
            assert found or not is_over, f"ended with {self.popen.returncode} and {self.events}"
            return found

        return eventually(look, bool)[0]

    def children(self, word: str) -> list[int]:
        """Return this process's descendants whose command line contains a word."""
        return children_of(self.popen.pid, word)

    def kill(self) -> None:
        """Kill the process group at once, as a power loss does; the driver's server ends by itself."""
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        for stream in (self.popen.stdin, self.popen.stdout):
            assert stream is not None
            stream.close()


def children_of(parent: int, word: str) -> list[int]:
    """Return the descendants of a process whose command line contains a word."""
    return [pid for pid in processes.below(parent) if word in processes.command_of(pid)]


class Watcher:
    """Reads the markers continuously, and records errors: torn, early or backward states."""

    def __init__(self, port: int, committed: Callable[[], int]) -> None:
        self.seen: Counter[int] = Counter()
        self.wrongs: list[str] = []
        self._port = port
        self._committed = committed
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        names = [f"{JOB}:n:{marker}" for marker in MARKERS]
        newest = 0
        client = redis.Redis(port=self._port, decode_responses=True, retry=None)
        while not self._is_over.wait(READ_PAUSE_S):
            try:
                found = client.mget(names)
            except redis.RedisError:  # there is no server just now, or it has just begun
                sleep(0.01)
                continue
            values = {int(value or 0) for value in found}
            count = max(values)
            if len(values) > 1:
                self.wrongs.append(f"torn: {found}")
            elif count > self._committed() + 1:
                self.wrongs.append(f"early: {count} files, but epoch {self._committed()} is the last committed one")
            elif count < newest:
                self.wrongs.append(f"back from {newest} to {count}")
            newest = max(newest, count)
            self.seen[count] += 1
        client.close()

    def stop(self) -> None:
        """Stop reading; fail if anything was wrong."""
        self._is_over.set()
        self._thread.join()
        assert not self.wrongs, self.wrongs[:3]
        assert self.seen


class Scene:
    """One job: its input, log, checkpoint, store and processes."""

    def __init__(self, folder: Path, seed: int = 1) -> None:
        self.folder = folder
        self.input, self.log, self.checkpoint = folder / "input", folder / "log", folder / "checkpoint"
        self.input.mkdir()
        self.log.mkdir()
        self.port = free_port()
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.last: dict[str, int] = {}
        self.reduces = False
        self._files = 0
        self._processes: list[Process] = []

    # Input and what has to come of it

    def add_files(self, count: int) -> None:
        """Add input files; each is one micro-batch, in this order."""
        for _ in range(count):
            named = [*MARKERS, *self.random.choices(KEYS, k=KEYS_PER_FILE)]
            self.counts.update(named)
            self.last.update(dict.fromkeys(named, self._files))
            unfinished = self.input / f".{self._files}.json"
            unfinished.write_text("".join(json.dumps({"k": key, "file": self._files}) + "\n" for key in named))
            os.utime(unfinished, (self._files + 1, self._files + 1))  # Spark takes files by their times
            unfinished.rename(self.input / f"{self._files:05d}.json")
            self._files += 1

    def forget(self) -> None:
        """Forget all files: only later ones count."""
        self.counts.clear()
        self.last.clear()
        self._files = 0

    def expected(self) -> dict[str, Any]:
        """Return the state after all files, computed without Spark."""
        values = {f"{JOB}:n:{key}": str(count) for key, count in self.counts.items()}
        if self.reduces:
            return values | {f"{JOB}:last:{key}": str(last) for key, last in self.last.items()}
        maps = {
            f"{JOB}:both:{key}": {"n": str(count), "last": str(self.last[key])} for key, count in self.counts.items()
        }
        return values | maps

    def state(self, port: int | None = None) -> dict[str, Any]:
        """Read the complete state from a server; empty while there is no server."""
        try:
            with redis.Redis(port=port or self.port, decode_responses=True, retry=None) as client:
                values = {key: client.get(key) for key in client.scan_iter(_type="string", count=1000)}
                return values | {key: client.hgetall(key) for key in client.scan_iter(_type="hash", count=1000)}
        except redis.RedisError:
            return {}

    def wait_for_all(self, port: int | None = None) -> None:
        """Wait until all files are readable, and fail if the state is not the expected one."""
        eventually(self.committed, lambda epoch: epoch == self._files - 1)
        eventually(lambda: self.state(port).get(f"{JOB}:n:{MARKERS[0]}"), lambda count: count == str(self._files))
        assert self.state(port) == self.expected()

    # The log

    def generation(self) -> str:
        """Return the current generation, or None."""
        current = ChangeLog(self.log).job(JOB).current()
        return "" if current is None else current.generation

    def epochs(self) -> list[int]:
        """Return the committed epochs of the current generation."""
        generation = self.generation()
        return sorted(int(path.stem) for path in (self.log / JOB / generation / "epochs").glob("[0-9]*.json"))

    def committed(self) -> int:
        """Return the last committed epoch, -1 if there is none."""
        return max(self.epochs(), default=-1)

    def wait_for_one_more(self) -> None:
        """Wait until a further epoch is committed."""
        reached = self.committed()
        eventually(self.committed, lambda epoch: epoch > reached)

    def epoch(self, number: int) -> bytes:
        """Return the path of an epoch's file."""
        return (self.log / JOB / self.generation() / "epochs" / f"{number}.json").read_bytes()

    # Processes

    def start_driver(self, *, checkpoint: Path | None = None, **orders: Any) -> Process:
        """Start a driver of this job."""
        told = Orders(
            str(self.input), str(self.log), str(checkpoint or self.checkpoint), **orders, reduces=self.reduces
        )
        return self._started([sys.executable, str(HERE / "driver.py"), json.dumps(asdict(told))])

    def start_server(self, store: str = "store", workers: int = 1) -> Process:
        """Start a server of the log without Spark; it is ready once it has found the log."""
        command = [sys.executable, "-m", "resp_server.programs.serve", "--child", "--loglevel", "error"]
        command += ["--log", str(self.log), "--store", str(self.folder / store), "--port", str(self.port)]
        command += ["--workers", str(workers)]
        server = self._started(command)
        server.wait_for("port")
        return server

    def _started(self, command: list[str]) -> Process:
        process = Process(command)
        self._processes.append(process)
        return process

    def watch(self) -> Watcher:
        """Start a watcher."""
        return Watcher(self.port, self.committed)

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
