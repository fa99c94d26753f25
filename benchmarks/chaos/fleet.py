"""The processes of a chaos run: a driver with its executors, and servers and proxies that are started by hand."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from benchmarks import processes
from benchmarks.chaos.judge import JOB
from compat.conformance.servers import free_port
from resp_server.net import children
from resp_server.net.children import TOKEN_VARIABLE
from resp_server.net.client import Client, ClientError
from resp_server.registry.registry_file import RECORD_FILE
from state_backend.log.change_log import ChangeLog
from state_backend.log.filesystems import open_filesystem

TOKEN = "chaos"
START_S_MAX = 120.0
STOP_S_MAX = 20.0


class ChaosError(Exception):
    """The run itself failed: a process did not start, or did not recover."""


@dataclass
class Process:
    """A process that this run started. port: for its clients."""

    name: str
    process: subprocess.Popen[str]
    port: int = 0

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    def end(self) -> None:
        """Stop it by closing its input; kill it if it does not end."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class ClusterRecord:
    """What a log says about the job and the cluster that serves it."""

    def __init__(self, log: Path | str) -> None:
        self._log = str(log)

    def committed(self) -> int:
        """Return the last committed epoch; -1 before the first."""
        log = ChangeLog(self._log).job(JOB)
        current = log.current()
        newest = None if current is None else log.newest(current)
        return -1 if newest is None else newest.epoch

    def address(self) -> str:
        """Return the registry's address."""
        return str(self._registry()["address"])

    def topology(self) -> dict[str, Any]:
        """Return the last published topology."""
        topology: dict[str, Any] = self._registry()["topology"]
        return topology

    def _registry(self) -> dict[str, Any]:
        stored = open_filesystem(self._log).read(RECORD_FILE)
        if stored is None:
            raise FileNotFoundError(f"{self._log} has no {RECORD_FILE}")
        record: dict[str, Any] = json.loads(stored)
        return record

    def owners(self) -> dict[str, str]:
        """Return the slots of each master, by its address."""
        nodes = self.topology()["nodes"]
        return {f"{node['host']}:{node['port']}": node["slots"] for node in nodes if node.get("slots")}

    def online(self) -> int:
        """Return the number of servers that are up and serve all their slots."""
        return sum(node.get("health", "online") == "online" for node in self.topology()["nodes"])

    def topology_size(self) -> int:
        """Return the number of servers in the topology."""
        return len(self.topology()["nodes"])


@dataclass
class Fleet:
    """All processes, with their files below one folder."""

    folder: Path
    replicas: int
    driver: Process | None = None
    servers: dict[str, Process] = field(default_factory=dict)
    proxies: list[Process] = field(default_factory=list)
    standby: Process | None = None

    def __post_init__(self) -> None:
        self.log = self.folder / "log"
        self.log.mkdir(parents=True)
        self.record = ClusterRecord(self.log)
        self._errors = (self.folder / "errors.txt").open("a")
        self._environment = children.environment() | {TOKEN_VARIABLE: TOKEN}

    # -- processes ----------------------------------------------------------------------------------------------------

    def start_driver(self) -> None:
        """Start the job, or restart it from its checkpoint; return once it writes."""
        words = ["--log", str(self.log), "--checkpoint", str(self.folder / "checkpoint")]
        self.driver = self._start(
            "driver", ["-m", "benchmarks.chaos.job", *words, "--replicas", str(self.replicas)], has_port=False
        )

    def start_standby(self) -> None:
        """Start a registry that takes over when the driver's fails."""
        words = ["registry", "--standby", "--child", "--log", str(self.log), "--port", "0"]
        words += ["--replicas", str(self.replicas), "--loglevel", "warning"]
        self.standby = Process("stand-by", self._popen(["-m", "sparkis", *words]))

    def start_server(self, name: str, *, advertise: int | None = None) -> Process:
        """Start a state server by hand. advertise: the port that it announces, that of a relay."""
        port = free_port()
        words = ["state-server", "--child", "--log", str(self.log), "--port", str(port)]
        words += ["--store", str(self.folder / name), "--loglevel", "warning"]
        if advertise is not None:
            words += ["--advertise", f"127.0.0.1:{advertise}"]
        started = self.servers[name] = replace(self._start(name, ["-m", "sparkis", *words]), port=port)
        return started

    def start_proxy(self) -> Process:
        """Start a proxy by hand, which finds the servers through the log."""
        words = ["proxy", "--child", "--log", str(self.log), "--port", "0"]
        started = self._start(f"proxy {len(self.proxies)}", ["-m", "sparkis", *words])
        self.proxies.append(started)
        return started

    def restart_proxy(self, number: int) -> None:
        """Restart a proxy on the same port."""
        ended = self.proxies[number]
        ended.process.wait()
        words = ["proxy", "--child", "--log", str(self.log), "--port", str(ended.port)]
        self.proxies[number] = self._start(ended.name, ["-m", "sparkis", *words])

    def command_driver(self, word: str) -> dict[str, Any]:
        """Make the driver lose or gain an executor."""
        assert self.driver is not None
        stdin, stdout = self.driver.process.stdin, self.driver.process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(f"{word}\n")
        stdin.flush()
        response: dict[str, Any] = json.loads(stdout.readline())
        return response

    def stop(self) -> None:
        """Stop all processes."""
        started = [*self.proxies, *self.servers.values(), *(each for each in (self.driver, self.standby) if each)]
        for each in started:
            with suppress(OSError):
                os.kill(each.pid, signal.SIGCONT)
        for each in started:
            each.end()
        self._errors.close()

    def _start(self, name: str, words: Sequence[str], *, has_port: bool = True) -> Process:
        process = self._popen(words)
        assert process.stdout is not None
        line = _first_line_of_json(process.stdout)
        if not line:
            process.kill()
            process.wait()
            raise ChaosError(f"{name} did not start; see {self._errors.name}")
        return Process(name, process, json.loads(line)["port"] if has_port else 0)

    def _popen(self, words: Sequence[str]) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, *words], stdin=pipe, stdout=pipe, stderr=self._errors, text=True, env=self._environment
        )

    def last_errors(self, lines: int = 40) -> str:
        """Return the last lines of the processes' standard error."""
        self._errors.flush()
        return "".join(Path(self._errors.name).read_text().splitlines(keepends=True)[-lines:])

    # -- their state --------------------------------------------------------------------------------------------------

    def masters(self, *, by_hand: bool) -> list[int]:
        """Return the processes of the masters that were, or were not, started by hand."""
        hands = {each.pid for each in self.servers.values()}
        found = [_pid_at(address) for address in self.record.owners()]
        return [pid for pid in found if pid is not None and (pid in hands) == by_hand]

    def driver_descendants(self, word: str) -> list[int]:
        """Return the driver's descendants whose command has a word."""
        assert self.driver is not None
        return [pid for pid in processes.below(self.driver.pid) if word in processes.command_of(pid)]

    def executors(self) -> list[int]:
        """Return the executors' JVMs."""
        return self.driver_descendants("CoarseGrainedExecutorBackend")

    def registry(self) -> int:
        """Return the registry's process."""
        return next(pid for pid in self.driver_descendants("registry") if "python" in processes.command_of(pid))

    def limit_files(self, server: int, bytes_max: int | None) -> None:
        """Limit the file size for a server's appliers, as on a full disk; None: remove the limit."""
        for pid in filter(processes.is_applier, processes.below(server)):
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if bytes_max is None else bytes_max, hard))


def _first_line_of_json(lines: IO[str]) -> str:
    """Return the first line that is JSON, as Spark prints other lines."""
    found: Iterator[str] = (line for line in lines if line.startswith("{"))
    return next(found, "")


def _pid_at(address: str) -> int | None:
    """Return the process of a server; None if none answers."""
    host, _, port = address.rpartition(":")
    try:
        with Client(host, int(port), timeout_s=1.0) as client:
            lines = client.call("INFO", "server").splitlines()
    except ClientError:
        return None
    return next(int(line.partition(":")[2]) for line in lines if line.startswith("process_id:"))
