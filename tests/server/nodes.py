"""Servers of one log as the nodes of a topology, and a proxy in front of them: processes that end with the test."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from compat.conformance.servers import CONTROL_TOKEN, Running, free_port, sparkis_proxy, sparkis_server
from compat.conformance.wire import Connection
from compat.waiting import WAIT_S_MAX, eventually
from resp_server.net.client import Client
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change

# A proxy's patience with servers that share a busy machine: as long as it may be.
PATIENT = ("--server-timeout", "60000")
HALVES = ({"slots": "0-8191"}, {"slots": "8192-16383"})


class Nodes:
    """The nodes of a topology. A row per node has its slots, or makes it a replica of the first one."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        *rows: Mapping[str, str],
        server_password: str | None = None,
        log: Path | None = None,
    ) -> None:
        self._folder, self._stack, self._server_password = folder, stack, server_password
        self.log = log or folder / "log"
        self.log.mkdir(exist_ok=True)
        self.ports = [free_port() for _ in rows]
        self.topology = folder / "cluster.json"
        self._version = 0
        self.write_topology(*rows)

    def write_topology(self, *rows: Mapping[str, str]) -> None:
        """Write a topology of the next version."""
        self._version += 1
        self._first_slots = sorted(int(each) for row in rows for each in re.findall(r"(\d+)-", row.get("slots", "")))
        nodes = [{"host": "127.0.0.1", "port": port, **row} for port, row in zip(self.ports, rows, strict=True)]
        for node in nodes:
            if "replica_of" in node:
                node["replica_of"] = f"127.0.0.1:{self.ports[0]}"
        new = self.topology.with_suffix(".new")
        new.write_text(json.dumps({"version": self._version, "nodes": nodes}))
        os.replace(new, self.topology)

    @property
    def version(self) -> int:
        """The version of the topology that was written last."""
        return self._version

    def requests_waiting_at(self, at: int, proxy: Running) -> int:
        """Return how many requests of a proxy wait for replies of a node."""
        with proxy.connect() as connection:
            text = connection.call("INFO", "proxy").plain.decode()
        (waiting,) = re.findall(rf"addr=127\.0\.0\.1:{self.ports[at]},.*?waiting=(\d+)", text)
        return int(waiting)

    def wait_for_slots(self, connection: Connection) -> None:
        """Wait until the process of a connection has the topology that was written last."""
        eventually(
            lambda: sorted(row.value[0].value for row in connection.call("CLUSTER", "SLOTS").value),
            lambda found: found == self._first_slots,
        )

    def start(self, at: int, *options: str) -> Running:
        """Start a node."""
        given = ("--cluster", str(self.topology), "--cluster-node", f"127.0.0.1:{self.ports[at]}", *options)
        store, port = self._folder / f"store{at}", self.ports[at]
        return self._stack.enter_context(
            sparkis_server(store, self.log, *given, port=port, server_password=self._server_password)
        )

    def start_proxy(self, *options: str) -> Running:
        """Start a proxy; by default with a timeout so long that a slow server makes no error."""
        return self._stack.enter_context(
            sparkis_proxy(self.topology, *PATIENT, *options, server_password=self._server_password)
        )


class PublishedNodes(Nodes):
    """Two servers with half of the slots each, a proxy, and a writer that tells the servers of each epoch.

    options: those of each server.
    """

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        states: Sequence[StateDescriptor],
        first: Iterable[Change],
        options: Sequence[Sequence[str]] = ((), ()),
    ) -> None:
        super().__init__(folder, stack, *HALVES)
        self.writer = stack.enter_context(LogWriter(self.log, "job", states))
        self.epoch = -1
        self.controls: list[Client] = []
        self.publish_changes(first)
        self.servers = [self.start(at, *each) for at, each in enumerate(options)]
        self.controls = [
            Client("127.0.0.1", each.control_port, password=CONTROL_TOKEN, timeout_s=WAIT_S_MAX)
            for each in self.servers
        ]
        self.proxy = self.start_proxy()

    def publish_changes(self, changes: Iterable[Change]) -> None:
        """Publish an epoch, and tell both servers."""
        self.epoch += 1  # first: a client may be faster than this process
        self.writer.publish(list(changes))
        for control in self.controls:
            control.call("NOTICE", "job", str(self.epoch))
