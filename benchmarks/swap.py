"""A proxy with an upstream: requests that it passes on, and reads of states, beside twemproxy and the upstream alone.

The same redis-server is behind our proxy and behind twemproxy, and is measured alone as well. Reads of states are
compared with those through a proxy without an upstream in front of the same state servers; and at `sparkis serve` with
the upstream with those at `sparkis serve` without one. A Redis Cluster is measured alone, and through a proxy.
"""

from __future__ import annotations

import csv
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import repeat
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol

import numpy as np

from benchmarks import processes
from benchmarks.options import Options
from benchmarks.proxy import SparkisProxied, end_process, start_program, start_twemproxy
from benchmarks.reads import CLIENTS, PIPELINES, REQUESTS, Case, benchmark, uniform
from benchmarks.redis_cluster import TAG, ClusterEndpoint, start_cluster, tag_of
from benchmarks.results import Row, compared_row, single_row
from benchmarks.servers import (
    LOAD_TIMEOUT_S,
    MSET_KEYS,
    BenchmarkError,
    ServerProcess,
    key,
    start_redis,
    temporary_folder,
    value,
)
from compat.waiting import eventually
from resp_server.net.client import Client, ClientError

# The share of the rate without an upstream that reads of states keep.
STATES_BUDGET = 0.95
CHECKED_KEYS = 100
DELAY_REQUESTS = 50_000
# One request at a time takes so many times as long as through twemproxy, at most.
DELAY_BUDGET = 1.1
# As many replies fit into a proxy's cache.
CACHED_KEYS = 10_000
IDLE_CLIENTS = 1_000
BLOCKED_CLIENTS = 1_000


class Endpoint(NamedTuple):
    """A process to measure, with its serving children. It is a proxy, a server, or the upstream itself."""

    name: str
    process: subprocess.Popen[bytes]
    port: int

    def rate(self, case: Case, pipeline: int, requests: int) -> tuple[float, float]:
        """Return the requests per second, and the microseconds of its processor time for each."""
        cpu_s = self._cpu_s()
        rate = benchmark(self.port, case, pipeline, requests)
        return rate, (self._cpu_s() - cpu_s) / requests * 1e6

    def _cpu_s(self) -> float:
        return sum(map(processes.cpu_s, processes.serving(self.process.pid)))


class Swap:
    """State servers with two proxies, one of them with an upstream, and twemproxy in front of the same upstream."""

    def __init__(self, keys: int, folder: Path, stack: ExitStack) -> None:
        self.keys = keys
        redis = start_redis(folder)
        stack.callback(end_process, redis.process)
        with Client("127.0.0.1", redis.port, timeout_s=30) as client:
            for start in range(0, keys, MSET_KEYS):
                some = range(start, min(keys, start + MSET_KEYS))
                client.call("MSET", *(word for each in some for word in (cache_key(each), value(each, 0))))
        self.states = SparkisProxied(keys, folder, stack)
        proxy = start_program(
            stack,
            "resp_server.programs.proxy",
            *("--log", str(folder / "log"), "--port", "0"),
            *("--upstream", f"redis://127.0.0.1:{redis.port}", "--ownership", str(folder / "owners.json")),
            *("--upstream-pinned", str(BLOCKED_CLIENTS)),
        )
        self.swap = Endpoint("sparkis", proxy.process, proxy.port)
        self.without = Endpoint("without an upstream", self.states.process, self.states.port)
        self.alone = Endpoint("redis-server", redis.process, redis.port)
        (folder / "twemproxy").mkdir()
        peer: ServerProcess = start_twemproxy(stack, folder / "twemproxy", [redis.port])
        self.peer = Endpoint("twemproxy", peer.process, peer.port)
        eventually(self._is_ready, awaited="the proxy", timeout_s=LOAD_TIMEOUT_S, error=BenchmarkError)

    def _is_ready(self) -> bool:
        try:
            with Client("127.0.0.1", self.swap.port) as client:
                return bool(client.call("DBSIZE") == 2 * self.keys)
        except ClientError:
            return False  # it is loading

    def answers(self) -> bool:
        """Return whether the proxy reaches the upstream."""
        return _answers(self.swap.port)

    def blocked_count(self) -> int:
        """Return the number of clients that are blocked at the upstream."""
        with Client("127.0.0.1", self.alone.port) as client:
            lines = str(client.call("INFO", "clients")).splitlines()
        return int(next(line for line in lines if line.startswith("blocked_clients:")).partition(":")[2])

    def check(self) -> None:
        """Read some keys of both backends; BenchmarkError if one has another value than was written."""
        with Client("127.0.0.1", self.swap.port, timeout_s=30) as client:
            for number in Random(2).choices(range(self.keys), k=CHECKED_KEYS):
                for name in (key(number), cache_key(number)):
                    if (found := client.call("GET", name)) != value(number, 0):
                        raise BenchmarkError(f"the proxy replied {found!r} for {name}")


def _answers(port: int) -> bool:
    """Return whether a proxy knows the owners of keys, and reaches the upstream."""
    try:
        with Client("127.0.0.1", port) as client:
            return bool(client.call("GET", cache_key(0)) == value(0, 0))
    except ClientError:
        return False


def cache_key(number: int) -> str:
    """Return a key of the upstream."""
    return f"cache:item:{number:012d}"


def run(options: Options) -> Iterator[Row]:
    """Yield the rows."""
    get = Case("GET", ("GET", "cache:item:__rand_int__"), options.keys)
    # These keys are not those that `check` reads.
    set_ = Case("SET", ("SET", "cache:written:__rand_int__", value(0, 0)), options.keys)
    with temporary_folder() as folder, ExitStack() as stack:
        scene = Swap(options.keys, folder, stack)
        yield from _memory_of_clients(scene)  # first: a process that had work has free memory
        for case in (get, set_):
            for pipeline in PIPELINES:
                yield from _passed_on(case, pipeline, scene, options)
        for pipeline in PIPELINES:
            yield _of_states(pipeline, scene, options)
        for pipeline in PIPELINES:
            yield _beside_a_stopped_upstream(pipeline, scene, options)
        busy = f"{CLIENTS} connections without a pause, so it is that of a busy machine; beside the upstream alone"
        yield from _delays("delay of a GET of the upstream's keys", get, CLIENTS, scene.alone, busy, scene, options)
        for case in (get, set_):
            name = f"delay of a {case.name} of the upstream's keys, one request at a time"
            yield from _delays(name, case, 1, scene.peer, "one connection", scene, options, DELAY_BUDGET)
        yield _beside_blocked_clients(get, scene, options)
        yield from _of_cached_keys(scene, folder, stack, options)
        yield from _of_serve(scene, folder, stack, options)
        yield from _of_cluster(folder, stack, options)


def _passed_on(case: Case, pipeline: int, scene: Swap, options: Options) -> Iterator[Row]:
    name = f"{case.name} of the upstream's keys, pipeline {pipeline}"
    found = _rounds(name, case, pipeline, (scene.swap, scene.peer, scene.alone), options)
    scene.check()
    for peer, note in ((scene.peer, "the processor time is the proxies'"), (scene.alone, "beside the upstream alone")):
        yield _compared(f"{name}, beside {peer.name}", found, scene.swap, peer, f"{options.keys:,} keys, {note}")


def _of_states(pipeline: int, scene: Swap, options: Options) -> Row:
    name = f"GET of states' keys with an upstream, pipeline {pipeline}"
    found = _rounds(name, uniform(options.keys), pipeline, (scene.swap, scene.without), options)
    scene.check()
    note = f"{options.keys:,} keys, beside a proxy without an upstream in front of the same state servers"
    return _compared(name, found, scene.swap, scene.without, note, budget=STATES_BUDGET)


def _of_cached_keys(scene: Swap, folder: Path, stack: ExitStack, options: Options) -> Iterator[Row]:
    """Yield the rates of reads that a proxy answers from its cache, beside those that a proxy passes on."""
    rules = folder / "cached.toml"
    rules.write_text('[[rule]]\nkeys = "cache:item:<n>"\nowner = "upstream"\ncache = "tracking"\n')
    proxy = start_program(
        stack,
        "resp_server.programs.proxy",
        *("--log", str(folder / "log"), "--port", "0", "--routes", str(rules)),
        *("--upstream", f"redis://127.0.0.1:{scene.alone.port}", "--ownership", str(folder / "cached.json")),
    )
    cached, passing = Endpoint("from the cache", proxy.process, proxy.port), scene.swap._replace(name="passed on")
    keys = min(CACHED_KEYS, options.keys)
    eventually(lambda: _answers(proxy.port))
    with Client("127.0.0.1", proxy.port, timeout_s=30) as client:
        for number in range(keys):
            client.call("GET", cache_key(number))
    case = Case("GET", ("GET", "cache:item:__rand_int__"), keys)
    for pipeline in PIPELINES:
        name = f"GET of the upstream's keys from the cache, pipeline {pipeline}"
        found = _rounds(name, case, pipeline, (cached, passing), options)
        note = f"{keys:,} keys, cached until they change; beside a proxy that passes them on to an upstream near it"
        yield _compared(name, found, cached, passing, note)


def _of_serve(scene: Swap, folder: Path, stack: ExitStack, options: Options) -> Iterator[Row]:
    """Yield the rates of `sparkis serve` with the upstream beside `sparkis serve` without one, with equal stores."""
    upstream = ("--upstream", f"redis://127.0.0.1:{scene.alone.port}", "--ownership", str(folder / "served.json"))
    swapped = _serve("with an upstream", scene.keys, folder, stack, upstream)
    plain = _serve("without an upstream", scene.keys, folder, stack)
    for pipeline in PIPELINES:
        name = f"GET of states' keys at `sparkis serve` with an upstream, pipeline {pipeline}"
        found = _rounds(name, uniform(options.keys), pipeline, (swapped, plain), options)
        note = f"{options.keys:,} keys, beside `sparkis serve` without one; the processor time is of all its processes"
        yield _compared(name, found, swapped, plain, note, budget=STATES_BUDGET)


def _serve(name: str, keys: int, folder: Path, stack: ExitStack, options: tuple[str, ...] = ()) -> Endpoint:
    """Start `sparkis serve`, and wait until it answers keys of states."""
    files = ("--log", str(folder / "log"), "--store", str(folder / name), "--port", "0")
    server = start_program(stack, "resp_server.programs.serve", *files, *options)
    last = keys - 1

    def is_ready() -> bool:
        try:
            with Client("127.0.0.1", server.port) as client:
                return bool(client.call("GET", key(last)) == value(last, 0))
        except ClientError:
            return False  # it is loading

    eventually(is_ready, awaited=f"a server {name}", timeout_s=LOAD_TIMEOUT_S, error=BenchmarkError)
    return Endpoint(name, server.process, server.port)


def _of_cluster(folder: Path, stack: ExitStack, options: Options) -> Iterator[Row]:
    """Yield the rates of requests that a proxy passes on to a Redis Cluster, beside the same cluster alone."""
    nodes = start_cluster(folder / "cluster", stack)
    proxy = start_program(
        stack,
        "resp_server.programs.proxy",
        *("--log", str(folder / "log"), "--port", "0", "--ownership", str(folder / "of_cluster.json")),
        *("--upstream", "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)),
    )
    alone = ClusterEndpoint("the cluster", [node.process for node in nodes], [node.port for node in nodes])
    through = ClusterEndpoint("sparkis", [proxy.process], [proxy.port] * len(nodes))
    for number, node in enumerate(nodes):
        with Client("127.0.0.1", node.port, timeout_s=30) as client:
            for start in range(0, options.keys, MSET_KEYS):
                some = range(start, min(options.keys, start + MSET_KEYS))
                names = [f"{{{tag_of(number)}}}{cache_key(each)}" for each in some]
                client.call(
                    "MSET", *(word for each in zip(names, map(value, some, repeat(0)), strict=True) for word in each)
                )

    def is_ready() -> bool:
        try:
            with Client("127.0.0.1", proxy.port) as client:
                names = [f"{{{tag_of(number)}}}{cache_key(0)}" for number in range(len(nodes))]
                return all(client.call("GET", name) == value(0, 0) for name in names)
        except ClientError:
            return False  # it is loading

    eventually(is_ready, awaited="the proxy", timeout_s=LOAD_TIMEOUT_S, error=BenchmarkError)
    get = Case("GET", ("GET", f"{{{TAG}}}cache:item:__rand_int__"), options.keys)
    set_ = Case("SET", ("SET", f"{{{TAG}}}cache:written:__rand_int__", value(0, 0)), options.keys)
    for case in (get, set_):
        for pipeline in PIPELINES:
            name = f"{case.name} of a Redis Cluster's keys, pipeline {pipeline}"
            found = _rounds(name, case, pipeline, (through, alone), options)
            note = (
                f"{options.keys:,} keys at each of three nodes, a load generator for each; beside the same nodes alone"
            )
            yield _compared(name, found, through, alone, note)


class Measured(Protocol):
    """What requests are sent to."""

    @property
    def name(self) -> str: ...

    def rate(self, case: Case, pipeline: int, requests: int) -> tuple[float, float]:
        """Return the requests per second, and the microseconds of processor time for each."""


Rounds = list[dict[str, tuple[float, float]]]


def _rounds(name: str, case: Case, pipeline: int, endpoints: tuple[Measured, ...], options: Options) -> Rounds:
    requests = max(CLIENTS * pipeline, int(REQUESTS[pipeline] * options.scale))
    rounds = []
    for number in range(options.rounds):
        options.report(f"{name}: round {number + 1} of {options.rounds}")
        order = endpoints if number % 2 == 0 else endpoints[::-1]  # alternate the order
        rounds.append({each.name: each.rate(case, pipeline, requests) for each in order})
    return rounds


def _compared(
    name: str, rounds: Rounds, ours: Measured, peer: Measured, note: str, *, budget: float | None = None
) -> Row:
    return compared_row(
        name,
        "swap",
        [(each[ours.name][0], each[peer.name][0]) for each in rounds],
        unit="requests/s",
        better="more",
        budget=budget,
        peer_name=peer.name,
        ours_cpu_us=float(np.median([each[ours.name][1] for each in rounds])),
        peer_cpu_us=float(np.median([each[peer.name][1] for each in rounds])),
        note=note,
    )


def _delays(
    name: str,
    case: Case,
    clients: int,
    peer: Endpoint,
    note: str,
    scene: Swap,
    options: Options,
    budget: float | None = None,
) -> Iterator[Row]:
    """Yield the delay of a request while clients send one request at a time, as redis-benchmark measures it."""
    requests = str(max(clients, int(DELAY_REQUESTS * options.scale)))
    rounds: list[dict[str, dict[str, str]]] = []
    for number in range(options.rounds):
        options.report(f"{name}: round {number + 1} of {options.rounds}")
        order = (scene.swap, peer) if number % 2 == 0 else (peer, scene.swap)
        found = {}
        for endpoint in order:
            command = ["redis-benchmark", "-p", str(endpoint.port), "-c", str(clients), "-n", requests]
            done = subprocess.run(
                [*command, "-r", str(case.key_range), "--csv", *case.words], capture_output=True, text=True, check=True
            )
            found[endpoint.name] = list(csv.DictReader(done.stdout.splitlines()))[-1]
        rounds.append(found)
    for share in ("p50", "p99"):
        column = f"{share}_latency_ms"
        yield compared_row(
            f"{name}, {share}",
            "swap",
            [(float(each[scene.swap.name][column]), float(each[peer.name][column])) for each in rounds],
            unit="ms",
            better="less",
            budget=budget,
            peer_name=peer.name,
            note=note,
        )


def _beside_a_stopped_upstream(pipeline: int, scene: Swap, options: Options) -> Row:
    """Return the rate of states' reads while the upstream is stopped, and a client waits for it."""
    name = f"GET of states' keys while the upstream is stopped, pipeline {pipeline}"
    case, requests = uniform(options.keys), max(CLIENTS * pipeline, int(REQUESTS[pipeline] * options.scale))
    rounds: Rounds = []
    for number in range(options.rounds):
        options.report(f"{name}: round {number + 1} of {options.rounds}")
        before = scene.swap.rate(case, pipeline, requests)
        with socket.create_connection(("127.0.0.1", scene.swap.port), 30) as waiting:
            scene.alone.process.send_signal(signal.SIGSTOP)
            try:
                waiting.sendall(f"GET {cache_key(0)}\r\n".encode())
                rounds.append({"stopped": scene.swap.rate(case, pipeline, requests), "running": before})
            finally:
                scene.alone.process.send_signal(signal.SIGCONT)
            if not waiting.recv(1 << 12).startswith((b"$", b"-TRYAGAIN")):
                raise BenchmarkError("the upstream's key was not answered after the pause")
    eventually(scene.answers, awaited="the upstream", timeout_s=LOAD_TIMEOUT_S, error=BenchmarkError)
    stopped, running = scene.swap._replace(name="stopped"), scene.swap._replace(name="running")
    note = f"{options.keys:,} keys, beside the same proxy while the upstream runs"
    return _compared(name, rounds, stopped, running, note, budget=STATES_BUDGET)


def _beside_blocked_clients(case: Case, scene: Swap, options: Options) -> Row:
    """Return the rate of other clients beside a thousand that are blocked at the upstream."""
    requests = max(CLIENTS, int(REQUESTS[1] * options.scale))
    rounds: Rounds = []
    for number in range(options.rounds):
        options.report(f"blocked clients: round {number + 1} of {options.rounds}")
        alone = scene.swap.rate(case, 1, requests)
        with ExitStack() as stack:
            _block(scene, stack)
            rounds.append({"beside": scene.swap.rate(case, 1, requests), "alone": alone})
        _wait_for_blocked(scene, 0)
    beside, alone_again = scene.swap._replace(name="beside"), scene.swap._replace(name="alone")
    note = f"pipeline 1; beside the same proxy without them; {options.keys:,} keys"
    return _compared(f"GET beside {BLOCKED_CLIENTS:,} blocked clients", rounds, beside, alone_again, note)


def _block(scene: Swap, stack: ExitStack) -> None:
    """Connect clients that are blocked at the upstream."""
    for number in range(BLOCKED_CLIENTS):
        made = stack.enter_context(socket.create_connection(("127.0.0.1", scene.swap.port), 30))
        made.sendall(f"BLPOP queue:{number} 0\r\n".encode())
    _wait_for_blocked(scene, BLOCKED_CLIENTS)


def _wait_for_blocked(scene: Swap, count: int) -> None:
    eventually(
        lambda: scene.blocked_count() == count,
        awaited=f"{count} blocked clients",
        timeout_s=LOAD_TIMEOUT_S,
        error=BenchmarkError,
    )


def _memory_of_clients(scene: Swap) -> Iterator[Row]:
    """Yield the memory that the proxy needs for one more client: an idle one, and a blocked one."""

    def used() -> int:
        return processes.memory(scene.swap.process.pid).anonymous_bytes

    before = used()
    with ExitStack() as stack:
        for number in range(IDLE_CLIENTS):
            made = stack.enter_context(socket.create_connection(("127.0.0.1", scene.swap.port), 30))
            made.sendall(f"GET {cache_key(number)}\r\nGET {key(number)}\r\n".encode())
            expected = 2 * len(f"$_\r\n{value(number, 0)}\r\n") + 2
            reply = b""
            while len(reply) < expected:
                if not (some := made.recv(1 << 12)):
                    raise BenchmarkError("the proxy closed a connection")
                reply += some
        idle = used()
        _block(scene, stack)
        blocked = used()
    _wait_for_blocked(scene, 0)
    for name, size, count, note in (
        ("memory of a client", idle - before, IDLE_CLIENTS, "idle; it has read a key of each backend"),
        ("memory of a blocked client", blocked - idle, BLOCKED_CLIENTS, "BLPOP, with its connection to the upstream"),
    ):
        yield single_row(name, "swap", [size / count / 1024], unit="KiB/client", note=f"{count:,} clients; {note}")
