"""How far a job is behind its sources, as servers, a proxy, its metrics and `sparkis status` show it."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from compat.conformance.servers import Running, child_environment, free_port, sparkis_proxy, sparkis_server
from compat.conformance.wire import Connection
from compat.waiting import eventually
from state_backend.log.epochs import EpochContent
from state_backend.log.log_writer import LogWriter
from state_backend.model.clock import now_ms
from state_backend.model.descriptor import StateDescriptor

STATE = StateDescriptor("count", key="k", value="n")
END = '{"orders":{"0":10,"1":20}}'
NEWEST = {"orders": {"0": 13, "1": 20, "2": 4}}
FIELDS = (b"source_lag_records", b"source_partitions", b"source_partition_lags")
UNKNOWN = [None, [], []]


@dataclass
class Scene:
    """The writer of a job, two servers of its log, each with half of the slots, and a proxy with metrics."""

    writer: LogWriter
    servers: list[Running]
    proxy: Running
    metrics_port: int

    def commit(self, number: int, *offsets: str) -> None:
        """Commit an epoch that ends at these offsets."""
        self.writer.start(number)
        self.writer.commit(number, clock_ms=self.writer.clock_ms(), offsets=offsets)

    def commit_ages(self, number: int, ages: dict[int, int]) -> None:
        """Commit an epoch whose records have these ages."""
        self.writer.start(number)
        self.writer.commit(number, EpochContent(record_ages=ages), clock_ms=self.writer.clock_ms())

    def wait_for(self, *expected: Any) -> None:
        """Wait until each server, and the proxy, say this of the source."""
        for each in (*self.servers, self.proxy):
            with each.connect() as client:
                for subcommand in ("LAG", "JOBS"):
                    eventually(lambda: lag_of(client, subcommand), lambda found: found == list(expected))  # noqa: B023

    def metrics(self) -> list[str]:
        """Return the proxy's metrics of the source, without the age."""
        connection = http.client.HTTPConnection("127.0.0.1", self.metrics_port, timeout=60)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        return [line for line in lines if line.startswith("sparkis_source_lag_records{")]


def lag_of(client: Connection, subcommand: str) -> list[Any]:
    [row] = client.call("STATE", subcommand).plain
    fields = dict(zip(row[::2], row[1::2], strict=True))
    is_known = fields[b"source_lag_records"] is not None
    assert (fields[b"source_lag_at"] is not None) == (fields[b"source_lag_age_ms"] is not None) == is_known
    return [fields[name] for name in FIELDS]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("source-lag")
    ports, topology, metrics_port = [free_port(), free_port()], folder / "topology.json", free_port()
    nodes = [
        {"host": "127.0.0.1", "port": port, "slots": slots}
        for port, slots in zip(ports, ("0-8191", "8192-16383"), strict=True)
    ]
    topology.write_text(json.dumps({"version": 1, "nodes": nodes}))
    with ExitStack() as stack:
        writer = stack.enter_context(LogWriter(folder / "log", "job", [STATE], "q", sends_heartbeats=False))
        made = Scene(writer, [], None, metrics_port)  # type: ignore[arg-type]
        made.commit(0, END)
        for port in ports:
            options = ("--cluster", str(topology), "--cluster-node", f"127.0.0.1:{port}")
            server = sparkis_server(folder / f"store-{port}", folder / "log", *options, port=port)
            made.servers.append(stack.enter_context(server))
        made.proxy = stack.enter_context(sparkis_proxy(topology, "--metrics", str(metrics_port)))
        yield made


def test_lag_follows_heartbeats_and_epochs_and_is_unknown_until_then(scene: Scene) -> None:
    scene.writer.send_heartbeat()
    scene.wait_for(*UNKNOWN)
    assert not scene.metrics()
    scene.writer.send_heartbeat(sources={"at_ms": now_ms(), "newest": {"0": NEWEST}})
    scene.wait_for(7, [b"orders/0", b"orders/1", b"orders/2"], [3, 0, 4])
    assert scene.metrics() == [
        f'sparkis_source_lag_records{{job_name="job",partition="{number}",topic="orders"}} {records}.0'
        for number, records in enumerate((3, 0, 4))
    ]
    scene.commit(1, '{"orders":{"0":13,"1":20,"2":1}}')
    scene.wait_for(3, [b"orders/0", b"orders/1", b"orders/2"], [0, 0, 3])
    assert "3 records, " in status(scene.proxy)
    scene.commit(2, '{"logOffset":7}')
    scene.wait_for(*UNKNOWN)
    assert "SOURCE LAG" not in status(scene.proxy)


def test_record_delays_are_shown_once_epoch_has_ages(scene: Scene) -> None:
    assert "RECORD DELAY" not in status(scene.proxy)
    scene.commit_ages(3, {0: 98, 80: 2})
    for each in (*scene.servers, scene.proxy):
        with each.connect() as client:
            found = eventually(lambda: delays_of(client), lambda found: found[1] is not None)
            assert found[0] < found[1] and found[1] >= 2**20 - 1
    assert "RECORD DELAY" in status(scene.proxy) and "p99 1,04" in status(scene.proxy)


def delays_of(client: Connection) -> list[Any]:
    """Return the quantiles of a job's record delays."""
    [row] = client.call("STATE", "LAG").plain
    fields = dict(zip(row[::2], row[1::2], strict=True))
    return [fields[b"record_delay_p50_ms"], fields[b"record_delay_p99_ms"]]


def status(server: Running) -> str:
    """Return what `sparkis status` prints."""
    command = [sys.executable, "-m", "sparkis", "status", "--url", f"redis://127.0.0.1:{server.port}"]
    return subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=True).stdout
