"""Start the servers that are compared: real redis-servers and ours, as processes on free ports of the loopback.

Each is started with the options that a user has, filled with a data set, and stopped through its own process handle.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from compat.conformance.dataset import Dataset
from compat.conformance.wire import Connection, replies_in, requests
from compat.fork_server import forked
from compat.processes import children_of
from compat.waiting import WAIT_S_MAX, eventually

# Ports below the system's ephemeral ports (Linux: from 32768 on). Each process searches from its own part of the range,
# by its process id.
PORTS = range(12_000, 32_000)
PORTS_OF_A_PROCESS = 200
_port_numbers = count()

STOP_S_MAX = 60.0

REDIS_SERVER = "redis-server"
# The options of a registry for tests without failures: no server counts as failed, however slow a busy machine is.
PATIENT_REGISTRY = (
    "-c",
    f"""
import sys
from resp_server.registry import service
from resp_server.programs import registry as process
service.SILENT_S = service.PEER_SILENT_S = service.DRAIN_S_MAX = {WAIT_S_MAX}
sys.exit(process.main())
""",
)
# The token of our servers' control listeners.
CONTROL_TOKEN = "of-the-tests"


@dataclass
class Running:
    """A running server."""

    port: int
    process: subprocess.Popen[bytes]
    password: str | None = None
    control_port: int = 0
    tls_port: int = 0

    def connect(self) -> Connection:
        """Open a connection, authenticated if there is a password."""
        connection = Connection(self.port)
        if self.password:
            connection.call("AUTH", self.password)
        return connection

    def workers(self) -> list[int]:
        """Return the process ids of a server's workers."""
        return sorted(pid for pid, line in children_of(self.process.pid).items() if b"programs.worker" in line)


def free_port() -> int:
    """Return a port that nothing listens on; neither the system nor this function assigns it to others."""
    parts = len(PORTS) // PORTS_OF_A_PROCESS
    first = PORTS.start + os.getpid() % parts * PORTS_OF_A_PROCESS
    for _ in range(PORTS_OF_A_PROCESS):
        port = first + next(_port_numbers) % PORTS_OF_A_PROCESS
        with suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"none of the ports {first} to {first + PORTS_OF_A_PROCESS - 1} is free")


def has_redis() -> bool:
    """Return whether a real redis-server is installed."""
    return shutil.which(REDIS_SERVER) is not None


@contextmanager
def redis_server(folder: Path, *options: str, password: str | None = None, port: int = 0) -> Iterator[Running]:
    """Run a real redis-server without persistence, in its own folder; port: 0: a free one."""
    arguments = ["--bind", "127.0.0.1", "--save", "", "--dir", str(folder), "--loglevel", "warning", *options]
    if password:
        arguments += ["--requirepass", password]
    chosen = port or free_port()
    process = subprocess.Popen(
        [REDIS_SERVER, "--port", str(chosen), *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    with _stopped_at_the_end(process):
        if not _has_started(chosen, process):
            raise RuntimeError(f"{REDIS_SERVER} does not start at port {chosen}: exit code {process.poll()}")
        yield Running(chosen, process, password)


def child_environment() -> dict[str, str]:
    """Return this process's environment without our settings, except the one that chooses the core."""
    return {
        name: text for name, text in os.environ.items() if name == "SPARKIS_PURE" or not name.startswith("SPARKIS_")
    }


@contextmanager
def sparkis_program(
    program: Sequence[str],
    *options: str,
    password: str | None = None,
    server_password: str | None = None,
    is_pure: bool = False,
) -> Iterator[Running]:
    """Run one of our programs as a child; it is ready once it prints its address. is_pure: without compiled code."""
    environment = child_environment()
    if is_pure:
        environment["SPARKIS_PURE"] = "1"
    environment["SPARKIS_CONTROL_TOKEN"] = CONTROL_TOKEN
    if password:
        environment["SPARKIS_PASSWORD"] = password
    if server_password:
        environment["SPARKIS_SERVER_PASSWORD"] = server_password
    # Its standard input stays open: a child ends with its parent.
    process = forked([*program, "--child", "--loglevel", "error", *options], environment)
    with _stopped_at_the_end(process):
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{program[-1]} does not start: exit code {process.wait()}")
        ports = json.loads(line)
        yield Running(ports["port"], process, password, ports.get("control_port") or 0, ports.get("tls_port") or 0)


@contextmanager
def sparkis_server(
    folder: Path,
    log: Path | str,
    *options: str,
    password: str | None = None,
    server_password: str | None = None,
    port: int = 0,
    program: Sequence[str] = ("-m", "resp_server.programs.serve"),
    is_loaded: bool = True,
    is_pure: bool = False,
) -> Iterator[Running]:
    """Run a sparkis server on a log, with its stores in its own folder. is_loaded: wait until it has loaded the log."""
    arguments = ("--port", str(port), "--log", str(log), "--store", str(folder), *options)
    with sparkis_program(
        program, *arguments, password=password, server_password=server_password, is_pure=is_pure
    ) as server:
        if is_loaded:
            eventually(lambda: not _is_loading(server), awaited="a server to be loaded", processes=[server.process])
        yield server


def _is_loading(server: Running) -> bool:
    """Return whether INFO says that a server is loading; False if INFO is refused, or if the server speaks only TLS."""
    with suppress(OSError, EOFError), server.connect() as connection:
        info = connection.call("INFO", "persistence")
        return not info.is_error and b"loading:1" in info.value
    return False


@contextmanager
def sparkis_proxy(
    topology: Path,
    *options: str,
    password: str | None = None,
    server_password: str | None = None,
    port: int = 0,
) -> Iterator[Running]:
    """Run a proxy in front of the servers of a topology."""
    arguments = ("--port", str(port), "--bind", "127.0.0.1", "--cluster", str(topology), *options)
    program = ("-m", "resp_server.programs.proxy")
    with sparkis_program(program, *arguments, password=password, server_password=server_password) as proxy:
        yield proxy


@contextmanager
def _stopped_at_the_end(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def _has_started(port: int, process: subprocess.Popen[bytes]) -> bool:
    """Wait until a server accepts connections; False if it ended, for example because its port was in use."""

    def replies() -> bool:
        with suppress(OSError, EOFError), Connection(port) as connection:
            connection.call("PING")
            return True
        return False

    return eventually(lambda: process.poll() is None and replies(), lambda found: found or process.poll() is not None)


def fill(server: Running, dataset: Dataset) -> None:
    """Write a data set into a real server; RuntimeError if it refuses any of it."""
    with server.connect() as connection:
        write(connection, dataset)


def write(connection: Connection, dataset: Dataset) -> None:
    """Write a data set as a client, which sends nothing more; RuntimeError if the server refuses any of it."""
    writes: list[Sequence[bytes]] = [(b"SET", key, value) for key, value in dataset.strings.items()]
    for key, fields in dataset.hashes.items():
        writes.append((b"HSET", key, *(part for pair in fields.items() for part in pair)))
    writes += [(b"RPUSH", key, *elements) for key, elements in dataset.lists.items()]
    writes += [(b"SADD", key, *members) for key, members in dataset.sets.items()]
    for key, scores in dataset.sorted_sets.items():
        writes.append((b"ZADD", key, *(part for member, score in scores.items() for part in (score, member))))
    writes += [(b"PEXPIREAT", key, b"%d" % at) for key, at in dataset.expire_at_ms.items()]
    connection.send(requests(writes))
    connection.end()
    replies = replies_in(connection.read_to_end())
    refused = [reply.raw for reply in replies if reply.is_error]
    if refused or len(replies) != len(writes):
        raise RuntimeError(
            f"the data set was not written: {len(replies)} replies to {len(writes)} writes, {refused[:3]}"
        )


def wait_for_keys(server: Running, count: int) -> None:
    """Wait until a server has at least `count` keys: an epoch becomes readable some time after its commit."""
    with server.connect() as connection:
        eventually(
            lambda: connection.call("DBSIZE"),
            lambda found: not found.is_error and found.plain >= count,
            f"a server to have {count} keys",
            processes=[server.process],
        )
