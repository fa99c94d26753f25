"""A Redis Cluster of three masters, and the rate of requests at it or at a proxy in front of it.

There is a load generator for the keys of each master: a generator has one address, and follows no MOVED. All three run
at the same time, each at its master or all at the proxy.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks import processes
from benchmarks.proxy import end_process
from benchmarks.reads import CLIENTS, Case, benchmark
from benchmarks.servers import START_TIMEOUT_S, BenchmarkError, ServerProcess, start_redis
from compat.conformance.servers import free_port
from compat.waiting import eventually
from resp_server.net.client import Client
from state_backend.model.slots import SLOTS, slot_of

MASTERS = 3
# In the keys of a case, it stands for a text whose slot a master has.
TAG = "TAG"


class ClusterEndpoint(NamedTuple):
    """Processes to measure, with their serving children. ports: where requests about each master's keys are sent."""

    name: str
    nodes: Sequence[subprocess.Popen[bytes]]
    ports: Sequence[int]

    def rate(self, case: Case, pipeline: int, requests: int) -> tuple[float, float]:
        """Return the requests per second, and the microseconds of processor time for each."""
        cpu_s = self._cpu_s()
        each = requests // MASTERS

        def of_master(number: int) -> float:
            words = tuple(word.replace(TAG, tag_of(number)) for word in case.words)
            part = replace(case, words=words, clients=-(-CLIENTS // MASTERS))
            return benchmark(self.ports[number], part, pipeline, each)

        with ThreadPoolExecutor(MASTERS) as pool:
            rates = list(pool.map(of_master, range(MASTERS)))
        return sum(rates), (self._cpu_s() - cpu_s) / (each * MASTERS) * 1e6

    def _cpu_s(self) -> float:
        return sum(processes.cpu_s(pid) for node in self.nodes for pid in processes.serving(node.pid))


def tag_of(number: int) -> str:
    """Return a text whose slot a master has."""
    texts = map(str, range(SLOTS))
    return next(text for text in texts if slot_of(text.encode()) * MASTERS // SLOTS == number)


def start_cluster(folder: Path, stack: ExitStack) -> Sequence[ServerProcess]:
    """Start masters with a third of the slots each; they end with the block."""
    bus_ports, nodes = [free_port() for _ in range(MASTERS)], []
    for number, bus_port in enumerate(bus_ports):
        (folder / str(number)).mkdir(parents=True)
        node = start_redis(folder / str(number), "--cluster-enabled", "yes", "--cluster-port", str(bus_port))
        stack.callback(end_process, node.process)
        nodes.append(node)
        with Client("127.0.0.1", node.port) as client:
            first, end = -(-SLOTS * number // MASTERS), -(-SLOTS * (number + 1) // MASTERS)
            client.call("CLUSTER", "ADDSLOTSRANGE", str(first), str(end - 1))
            client.call("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
            client.call("CLUSTER", "MEET", "127.0.0.1", str(nodes[0].port), str(bus_ports[0]))
    eventually(lambda: all(map(_is_ok, nodes)), awaited="the cluster", timeout_s=START_TIMEOUT_S, error=BenchmarkError)
    return nodes


def _is_ok(node: ServerProcess) -> bool:
    with Client("127.0.0.1", node.port) as client:
        lines = str(client.call("CLUSTER", "INFO")).splitlines()
        known = str(client.call("CLUSTER", "NODES")).count("master")
    return "cluster_state:ok" in lines and known == MASTERS
