"""The places where clients are measured: each has sparkis and a redis-server, with the same keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from benchmarks import processes
from benchmarks.clients.programs import KEYS, READS, WRITES, Workload, dataset
from benchmarks.commands.data import STATES, UPSTREAM
from benchmarks.proxy import end_process, start_program, start_state_servers
from benchmarks.servers import LOAD_TIMEOUT_S, BenchmarkError, ServerProcess, start_redis
from compat.conformance.dataset_log import dataset_writer, publish
from compat.conformance.servers import write
from compat.conformance.wire import Connection
from compat.waiting import eventually


class Endpoint(NamedTuple):
    """An address, and all processes that answer there."""

    port: int
    pids: Sequence[int]

    def cpu_s(self) -> float:
        """Return the processor time of its processes, without those that apply logs."""
        return sum(map(processes.cpu_s, self.pids))


class Place(NamedTuple):
    """What is measured beside redis-server. prefix: that of the keys."""

    name: str
    prefix: str
    workloads: Sequence[Workload]
    ours: Endpoint
    redis: Endpoint


SERVE, PROXY = "serve", "a proxy to two servers"
OF_STATES, OF_UPSTREAM = "with an upstream: a state's keys", "with an upstream: its keys"
PLACES = (SERVE, PROXY, OF_STATES, OF_UPSTREAM)


class Scene:
    """The states' log, and a redis-server with the keys of states and those of the upstream."""

    def __init__(self, folder: Path, stack: ExitStack, keys: int = KEYS) -> None:
        self._folder, self._keys = folder, keys
        with dataset_writer(folder / "log") as writer:
            publish(dataset(STATES, keys), writer)
        redis = self._start_redis(stack, STATES, UPSTREAM)
        self._redis = Endpoint(redis.port, [redis.process.pid])

    def places(self) -> Iterator[Place]:
        """Start each place, and yield it; its servers end when the next one is asked for."""
        starts: Sequence[Callable[[ExitStack], Iterator[Place]]] = (self._server, self._proxy, self.upstream)
        for start in starts:
            with ExitStack() as stack:
                yield from start(stack)

    def _server(self, stack: ExitStack) -> Iterator[Place]:
        """Start a state server alone."""
        yield Place(SERVE, STATES, READS, self._serve("serve", stack), self._redis)

    def _proxy(self, stack: ExitStack) -> Iterator[Place]:
        log, folder = self._folder / "log", self._folder / "proxied"
        folder.mkdir()
        _, servers = start_state_servers(stack, folder, log)
        proxy = start_program(stack, "resp_server.programs.proxy", "--log", str(log), "--port", "0")
        self._wait_for(proxy.port, STATES)
        pids = [pid for each in (proxy, *servers) for pid in processes.serving(each.process.pid)]
        yield Place(PROXY, STATES, READS, Endpoint(proxy.port, pids), self._redis)

    def upstream(self, stack: ExitStack) -> Iterator[Place]:
        """Start one address for the states and an upstream, and yield a place for the keys of each."""
        upstream = self._start_redis(stack, UPSTREAM)
        url, owners = f"redis://127.0.0.1:{upstream.port}", self._folder / "owners.json"
        ours = self._serve("swap", stack, "--upstream", url, "--ownership", str(owners))
        self._wait_for(ours.port, UPSTREAM)
        yield Place(OF_STATES, STATES, READS, ours, self._redis)
        yield Place(OF_UPSTREAM, UPSTREAM, (*READS, *WRITES), ours, self._redis)

    def _serve(self, name: str, stack: ExitStack, *options: str) -> Endpoint:
        files = ("--log", str(self._folder / "log"), "--store", str(self._folder / f"store of {name}"))
        server = start_program(stack, "resp_server.programs.serve", *files, "--port", "0", *options)
        self._wait_for(server.port, STATES)
        return Endpoint(server.port, processes.serving(server.process.pid))

    def _start_redis(self, stack: ExitStack, *prefixes: str) -> ServerProcess:
        server = start_redis(self._folder)
        stack.callback(end_process, server.process)
        for prefix in prefixes:
            with Connection(server.port) as connection:
                write(connection, dataset(prefix, self._keys))
        return server

    def _wait_for(self, port: int, prefix: str) -> None:
        """Wait until an address has the last key of each kind."""
        keys = dataset(prefix, self._keys)
        names = (list(keys.strings)[-1], list(keys.hashes)[-1])

        def has_all() -> bool:
            try:
                with Connection(port) as connection:
                    return all(connection.call("EXISTS", name).value == 1 for name in names)
            except EOFError:
                return False

        eventually(has_all, awaited="the keys are loaded", timeout_s=LOAD_TIMEOUT_S, error=BenchmarkError)
