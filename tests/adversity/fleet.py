"""A registry, state servers and readers, as processes and threads, with a log that grows while they run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from time import sleep
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.retry import Retry

from compat.conformance.servers import PATIENT_REGISTRY, child_environment, free_port
from compat.fork_server import ForkedProcess
from compat.waiting import READ_PAUSE_S, WAIT_S_MAX, eventually
from resp_server.net.client import Client, ClientError
from resp_server.registry.registry_file import RegistryFile
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

TOKEN = "of-the-tests"
JOB = "job"
KEYS = [f"{JOB}:n:k{number}" for number in range(300)]
EPOCH_EVERY_S = 0.2


class Process:
    """A registry or a state server. A standby registry prints nothing, so its start is not awaited."""

    def __init__(self, program: Sequence[str], options: list[str], log: Path) -> None:
        self.log = log
        self._errors = log.open("ab")
        self.popen = ForkedProcess(
            [sys.executable, *program, "--child", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=child_environment() | {"SPARKIS_CONTROL_TOKEN": TOKEN},
        )
        assert self.popen.stdout is not None
        self.port = 0
        if "--standby" not in options:
            line = self.popen.stdout.readline()
            assert line, log.read_text()
            self.port = json.loads(line)["port"]

    @property
    def output(self) -> str:
        return self.log.read_text()

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self.popen.kill()
        self.popen.wait()

    def close(self) -> None:
        self.kill()
        for stream in (self.popen.stdin, self.popen.stdout, self._errors):
            assert stream is not None
            stream.close()


class Reader:
    """A cluster client that reads keys continuously. Each value is the number of the epoch that wrote it."""

    def __init__(self, fleet: Fleet) -> None:
        self.reads = 0
        self.wrongs: list[str] = []
        self.failures: list[str] = []
        self._fleet = fleet
        self._is_over = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        client = self._fleet.client()
        at = 0
        while not self._is_over.wait(READ_PAUSE_S):
            at = (at + 7) % len(KEYS)
            try:
                found = client.get(KEYS[at])
                newest = self._fleet.epoch
                if found is None or not 0 <= int(found) <= newest:
                    self.wrongs.append(f"{KEYS[at]} is {found!r}, and epoch {newest} is the newest")
                self.reads += 1
            except (redis.RedisError, OSError) as error:
                self.failures.append(f"{KEYS[at]}: {error!r}")
                sleep(0.01)
        client.close()

    def stop(self) -> None:
        """Stop reading; fail if anything was wrong."""
        self._is_over.set()
        self._thread.join()
        assert not self.wrongs, self.wrongs[:3]
        assert self.reads


class Fleet:
    """The processes of a test, and their end."""

    def __init__(self, folder: Path, *, replicas: int = 0) -> None:
        self.folder, self.log = folder, folder / "log"
        self.log.mkdir()
        self.replicas = replicas
        self.epoch = -1
        self._ports = [free_port() for _ in range(6)]
        self.servers: list[Process] = []
        self._processes: list[Process] = []
        self._readers: list[Reader] = []
        self._is_over = Event()
        self._writer = LogWriter(self.log, JOB, [StateDescriptor("n", key="k", value="v")])
        self._publish()
        self._publishing = Thread(target=self._keep_publishing, daemon=True)
        self._publishing.start()

    def _publish(self) -> None:
        self.epoch += 1  # first: who reads it may be faster than we are
        self._writer.publish([Change("n", Op.PUT, key.encode(), value=b"%d" % self.epoch) for key in KEYS])

    def _keep_publishing(self) -> None:
        while not self._is_over.wait(EPOCH_EVERY_S):
            self._publish()
            with suppress(ClientError, OSError, FileNotFoundError), self.ask(EPOCH_EVERY_S) as registry:
                registry.call("NOTICE", JOB, str(self.epoch))

    # Processes

    def registry(self, *options: str, program: Sequence[str] = PATIENT_REGISTRY, log: Path | None = None) -> Process:
        """Start a registry; by default its timeout is so long that a slow server does not count as silent."""
        given = ["--log", str(log or self.log), "--port", "0", "--replicas", str(self.replicas), *options]
        return self._started(program, given, "registry")

    def server(self, number: int, *more: str, log: Path | None = None) -> Process:
        """Start a state server; the same number is the same server again."""
        options = ["--log", str(log or self.log), "--compact", "--store", str(self.folder / f"store{number}")]
        options += ["--port", str(self._ports[number]), *more]
        self.servers.append(self._started(("-m", "resp_server.programs.state_server"), options, f"server{number}"))
        return self.servers[-1]

    def halves(self) -> tuple[Process, Process]:
        """Start two servers, one after the other, with half of the slots each."""
        first = self.server(0)
        self.wait_for(_0="0-16383")
        second = self.server(1)
        self.wait_for(_0="0-8191", _1="8192-16383")
        return first, second

    def _started(self, program: Sequence[str], options: list[str], name: str) -> Process:
        self._processes.append(Process(program, options, self.folder / f"{name}.{len(self._processes)}.log"))
        return self._processes[-1]

    def read(self) -> Reader:
        """Start a reader."""
        self._readers.append(Reader(self))
        return self._readers[-1]

    def close(self) -> None:
        for reader in self._readers:
            reader._is_over.set()
            reader._thread.join()
        self._is_over.set()
        self._publishing.join()
        self._writer.close()
        for process in self._processes:
            process.close()

    # What is there

    def client(self) -> Any:
        """Connect to the cluster as its clients do, by any of its servers."""
        nodes = [ClusterNode("127.0.0.1", port) for port in self._ports]
        return RedisCluster(startup_nodes=nodes, decode_responses=True, retry=Retry(NoBackoff(), 16))

    def record(self) -> RegistryFile:
        """Return the registry's record."""
        return RegistryFile.parse((self.log / "registry.json").read_bytes(), "registry.json")

    def ask(self, timeout_s: float = WAIT_S_MAX) -> Client:
        """Connect to the registry."""
        host, _, port = self.record().address.rpartition(":")
        return Client(host, int(port), password=TOKEN, timeout_s=timeout_s)

    def nodes(self) -> dict[int, tuple[str, str, str]]:
        """Return role, slots and health of each server, by its number; empty while there is no topology."""
        topology = self.record().topology
        numbers = {port: number for number, port in enumerate(self._ports)}
        return {
            numbers[node.port]: ("replica" if node.is_replica else "master", str(node.slots), str(node.health))
            for node in (topology.nodes if topology is not None else ())
        }

    def wait_for(self, **expected: str) -> None:
        """Wait until servers have these slots: `_0="0-8191"`, or "replica"."""

        def topology_versions() -> dict[str, str]:
            return {
                f"_{number}": slots if role == "master" else role
                for number, (role, slots, health) in self.nodes().items()
                if health == "online"
            }

        eventually(
            lambda: (topology_versions(), self.nodes()), lambda found: found[0] == expected, f"{expected} is waited for"
        )

    def wait_until_all_show_it(self) -> None:
        """Wait until every server has the newest topology, and stores exactly its slots."""

        def is_quiet() -> bool:
            with self.ask() as registry:
                members = [dict(zip(row[::2], row[1::2], strict=True)) for row in map(_flat, registry.call("MEMBERS"))]
            topology = self.record().topology
            assert topology is not None
            return all(
                each["topology_version"] == topology.version and each["owned_slots"] == each["desired_slots"]
                for each in members
            )

        eventually(is_quiet, awaited="all servers show the topology")

    def wait_for_all_keys(self) -> None:
        """Wait until all keys are read at a new epoch."""
        since = self.epoch
        client = self.client()

        def are_all_new() -> bool:
            with suppress(redis.RedisError, OSError):
                return all(int(client.get(key)) > since for key in KEYS)
            return False

        eventually(are_all_new, awaited="replies to all keys")
        client.close()


def _flat(row: Any) -> list[Any]:
    return [item for pair in row.items() for item in pair] if isinstance(row, dict) else list(row)
