"""GET and MGET through our proxy to two state servers, beside twemproxy to two redis-servers.

The load generator sends requests over 50 connections to both in turns, while one key in a hundred changes every second.
Then a Python client with one connection to each server is compared with one that has two connections to the proxy.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import hiredis
import numpy as np

from benchmarks.options import Options
from benchmarks.reads import CLIENTS, PIPELINES, REQUESTS, Case, benchmark, uniform
from benchmarks.results import Row, compared_row
from benchmarks.servers import (
    JOB,
    LOAD_KEYS,
    LOAD_TIMEOUT_S,
    MSET_KEYS,
    SETTLE_TIMEOUT_S,
    START_TIMEOUT_S,
    STATE,
    TOKEN,
    BenchmarkError,
    KeyNumbers,
    ServerProcess,
    ServerUnderTest,
    key,
    load_log,
    publish,
    runs_of_values,
    start_redis,
    temporary_folder,
    value,
)
from compat.conformance.servers import free_port
from compat.waiting import eventually
from resp_server.net import children
from resp_server.net.children import TOKEN_VARIABLE
from resp_server.net.client import Client, ClientError
from state_backend.model.slots import SLOTS, slot_of

# By pipeline depth.
GET_BUDGETS = {1: 1.0, 16: 1.5, 100: 3.0}
MGET_BUDGETS = {1: 1.0}
PEER = "twemproxy"
# twemproxy with one connection to each server, several requests in one write, and its default page size. More
# connections, and larger or smaller pages, were slower at all depths (measured).
TWEMPROXY = """\
bench:
  listen: 127.0.0.1:{port}
  hash: crc16
  distribution: modula
  redis: true
  tcpkeepalive: true
  timeout: 5000
  backlog: 1024
  preconnect: true
  server_connections: 1
  servers:
"""
MGET_KEYS = 100
# The largest share of requests that the proxy repeats, because one server was behind another during a pipeline.
REPEATED_SHARE = 0.02
DIRECT_DEPTH = 100
DIRECT_SECONDS = 1.5


class Proxied(ServerUnderTest):
    """Two servers and a proxy in front of them; the processor time is the proxy's."""

    server_ports: Sequence[int] = ()

    def calls(self, command: str) -> int:
        """Return the servers' number of calls; a split request counts for each part."""
        found = 0
        for port in self.server_ports:
            with Client("127.0.0.1", port) as client:
                lines = str(client.call("INFO", "commandstats")).splitlines()
            counts = [line for line in lines if line.startswith(f"cmdstat_{command}:calls=")]
            found += sum(int(line.partition("calls=")[2].partition(",")[0]) for line in counts)
        return found

    def stop(self) -> None:
        """Stop the changes; the processes end with the block that started them."""
        self._ends.set()
        self._is_changing.set()


class SparkisProxied(Proxied):
    """State servers with slots from a registry, and our proxy."""

    name = "sparkis"

    def __init__(self, keys: int, folder: Path, stack: ExitStack) -> None:
        super().__init__(keys)
        log = folder / "log"
        self.writer = load_log(log, keys, has_maps_and_lists=False)
        registry_port, servers = start_state_servers(stack, folder, log)
        self.server_ports = [each.port for each in servers]
        self._registry = stack.enter_context(Client("127.0.0.1", registry_port, password=TOKEN, timeout_s=30))
        options = ("--log", str(log), "--port", "0")
        self.process, self.port, _ = start_program(stack, "resp_server.programs.proxy", *options)
        eventually(
            lambda: self._row()[1] == keys,
            awaited="the servers have loaded their data",
            timeout_s=LOAD_TIMEOUT_S,
            error=BenchmarkError,
        )

    def _row(self) -> tuple[int, int]:
        """Return the epoch that all servers have, and the number of keys; -1 and 0 while they are not ready."""
        try:
            with Client("127.0.0.1", self.port) as client:
                if client.call("DBSIZE") != self.keys:
                    return -1, 0
                client.call("HELLO", "3")
                (row,) = client.call("STATE", "JOBS")
        except (ClientError, ValueError):
            return -1, 0
        return (-1, 0) if row["error"] else (int(row["applied"]), int(row["keys"]))

    def put(self, numbers: KeyNumbers, turn: int) -> None:
        epoch = publish(self.writer, runs_of_values(numbers, turn))
        self._registry.call("NOTICE", JOB, str(epoch))

    def settle(self) -> None:
        last = self.writer.last
        eventually(
            lambda: last is not None and self._row()[0] == last.epoch,
            awaited="applying the last epoch",
            timeout_s=SETTLE_TIMEOUT_S,
            error=BenchmarkError,
        )


class RedisProxied(Proxied):
    """Two redis-servers, and twemproxy."""

    name = PEER

    def __init__(self, keys: int, folder: Path, stack: ExitStack) -> None:
        super().__init__(keys)
        servers = [start_redis(folder) for _ in range(2)]
        for server in servers:
            stack.callback(end_process, server.process)
        self.server_ports = [server.port for server in servers]
        self.process, self.port, _ = start_twemproxy(stack, folder, self.server_ports)
        for start in range(0, keys, LOAD_KEYS):
            self.put(np.arange(start, min(keys, start + LOAD_KEYS), dtype=np.int64), 0)

    def put(self, numbers: KeyNumbers, turn: int) -> None:
        with Client("127.0.0.1", self.port, timeout_s=30) as client:
            plain = numbers.tolist()
            for start in range(0, len(plain), MSET_KEYS):
                words = [word for each in plain[start : start + MSET_KEYS] for word in (key(each), value(each, turn))]
                client.call("MSET", *words)

    def settle(self) -> None:
        """Do nothing, as written data can be read at once."""


def start_program(stack: ExitStack, module: str, *options: str) -> ServerProcess:
    """Start one of our programs, which ends with the block."""
    command = [sys.executable, "-m", module, "--child", "--loglevel", "error", *options]
    environment = children.environment() | {TOKEN_VARIABLE: TOKEN}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    stack.callback(end_process, process)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise BenchmarkError(f"{module} did not start; the line above has the reason")
    return ServerProcess(process, int(json.loads(line)["port"]))


def start_state_servers(stack: ExitStack, folder: Path, log: Path) -> tuple[int, list[ServerProcess]]:
    """Start a registry and two state servers of a log, which end with the block; return its port, and the servers."""
    options = ("--log", str(log), "--port", "0")
    registry = start_program(stack, "resp_server.programs.registry", *options)
    stores = [("--store", str(folder / f"store{number}")) for number in range(2)]
    servers = [start_program(stack, "resp_server.programs.state_server", *options, *each) for each in stores]
    return registry.port, servers


def start_twemproxy(stack: ExitStack, folder: Path, server_ports: Sequence[int]) -> ServerProcess:
    """Start twemproxy in front of redis-servers; it ends with the block."""
    port, config = free_port(), folder / "twemproxy.yml"
    config.write_text(TWEMPROXY.format(port=port) + "".join(f"   - 127.0.0.1:{each}:1\n" for each in server_ports))
    command = ["nutcracker", "-c", str(config), "-s", str(free_port()), "-a", "127.0.0.1", "-v", "0"]
    command += ["-o", str(folder / "twemproxy.log"), "-p", str(folder / "twemproxy.pid")]
    process = subprocess.Popen(command)
    stack.callback(end_process, process)

    def is_listening() -> bool:
        if process.poll() is not None:
            raise BenchmarkError("twemproxy did not start")
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    eventually(
        is_listening, awaited="the start of twemproxy", timeout_s=START_TIMEOUT_S, interval_s=0.01, error=BenchmarkError
    )
    return ServerProcess(process, port)


def end_process(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def both(keys: int) -> Iterator[tuple[SparkisProxied, RedisProxied]]:
    """Run both; they are stopped and their files removed after the block."""
    with temporary_folder() as folder, ExitStack() as stack:
        ours, peer = SparkisProxied(keys, folder, stack), RedisProxied(keys, folder, stack)
        for server in (ours, peer):
            stack.callback(server.stop)
            server.start_changes()
        yield ours, peer


def run(options: Options) -> Iterator[Row]:
    """Yield a row for each case and pipeline depth."""
    mget = Case(f"MGET {MGET_KEYS}", ("MGET", *[f"{JOB}:{STATE}:__rand_int__"] * MGET_KEYS), options.keys, cost=60)
    with both(options.keys) as servers:
        for case, pipelines in ((uniform(options.keys), PIPELINES), (mget, PIPELINES[:1])):
            for pipeline in pipelines:
                yield _measured(case, pipeline, servers, options)
        yield _direct(servers[0], options)


def _measured(case: Case, pipeline: int, servers: tuple[Proxied, Proxied], options: Options) -> Row:
    name = f"{case.name} through a proxy, pipeline {pipeline}"
    command = case.words[0].lower()
    requests = max(CLIENTS * pipeline, int(REQUESTS[pipeline] * options.scale / case.cost))
    random = Random(2)
    rounds: list[list[tuple[float, float]]] = []
    for number in range(options.rounds):
        options.report(f"{name}: round {number + 1} of {options.rounds}")
        found = {}
        for server in servers if number % 2 == 0 else servers[::-1]:  # alternate the order
            with server.changing():
                calls, cpu_s = server.calls(command), server.cpu_s()
                rate = benchmark(server.port, case, pipeline, requests)
                used_s, counted = server.cpu_s() - cpu_s, server.calls(command) - calls
            # Only complete pipelines are sent. A split request counts for each part.
            most = requests * (1 + REPEATED_SHARE) + CLIENTS * pipeline
            if command == "get" and not requests <= counted <= most:
                raise BenchmarkError(f"{server.name}'s servers counted {counted} {command} of {requests} sent")
            server.check_sample(random)
            found[server.name] = (rate, used_s / requests * 1e6)
        rounds.append([found[server.name] for server in servers])
    return compared_row(
        name,
        "proxy",
        [(ours[0], peer[0]) for ours, peer in rounds],
        unit="requests/s",
        better="more",
        budget=(GET_BUDGETS if command == "get" else MGET_BUDGETS).get(pipeline),
        peer_name=PEER,
        ours_cpu_us=float(np.median([ours[1] for ours, _ in rounds])),
        peer_cpu_us=float(np.median([peer[1] for _, peer in rounds])),
        note=f"{options.keys:,} keys, two servers each; the processor time is the proxies'",
    )


def _direct(ours: SparkisProxied, options: Options) -> Row:
    """Compare a client that knows the slots with the same one at the proxy; it is one Python process."""
    with Client("127.0.0.1", ours.server_ports[0]) as client:
        first = client.call("CLUSTER", "SLOTS")
    owners = {slot: int(row[2][1]) for row in first for slot in range(int(row[0]), int(row[1]) + 1)}
    if len(owners) != SLOTS:
        raise BenchmarkError("not every slot has an owner")
    random = Random(3)
    keys = [key(number).encode() for number in random.sample(range(ours.keys), min(ours.keys, 20_000))]
    by_port = {port: [each for each in keys if owners[slot_of(each)] == port] for port in ours.server_ports}
    pairs = []
    for number in range(options.rounds):
        options.report(f"cluster client: round {number + 1} of {options.rounds}")
        with ours.changing():
            direct = _rate(list(by_port.items()), options)
            proxied = _rate([(ours.port, some) for some in by_port.values()], options)
        pairs.append((direct, proxied))
    return compared_row(
        f"GET by a cluster client, pipeline {DIRECT_DEPTH}",
        "proxy",
        pairs,
        unit="requests/s",
        better="more",
        peer_name="our proxy",
        note="one Python process with two connections, to the two servers or both to the proxy",
    )


def _get(key: bytes) -> bytes:
    words = (b"GET", key)
    packed: bytes = hiredis.pack_command(words)  # type: ignore[arg-type]  # hiredis' stub has a tuple of one word
    return packed


def _rate(keys_by_port: Sequence[tuple[int, Sequence[bytes]]], options: Options) -> float:
    """Return the requests per second of a client that sends pipelines over all connections at once."""
    with ExitStack() as stack:
        sockets = []
        for port, keys in keys_by_port:
            made = stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            starts = range(0, len(keys) - DIRECT_DEPTH + 1, DIRECT_DEPTH)
            packed = [b"".join(map(_get, keys[start : start + DIRECT_DEPTH])) for start in starts]
            sockets.append((made, packed, hiredis.Reader()))
        done, turn, started_s = 0, 0, time.perf_counter()
        while time.perf_counter() - started_s < DIRECT_SECONDS * options.scale:
            for made, packed, _ in sockets:
                made.sendall(packed[turn % len(packed)])
            for made, _, reader in sockets:
                for _ in range(DIRECT_DEPTH):
                    while (reply := reader.gets()) is False:
                        reader.feed(made.recv(1 << 16))
                    if not isinstance(reply, bytes):
                        raise BenchmarkError(f"the reply was {reply!r}")
            done += DIRECT_DEPTH * len(sockets)
            turn += 1
        return done / (time.perf_counter() - started_s)
