"""Servers of a log in an S3 bucket, behind a proxy: none of them looks at the bucket by itself while a test runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from compat.conformance.servers import CONTROL_TOKEN, sparkis_proxy, sparkis_server
from compat.conformance.wire import Connection
from compat.waiting import WAIT_S_MAX, eventually
from resp_server.net.client import Client
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from state_backend.model.slots import slot_of
from tests.server.nodes import HALVES, PATIENT, Nodes

STATE = StateDescriptor("n", key="k", value="v")
# As after a pause of the job that has made the polls rare, only more so.
SERVE_WITHOUT_POLLS = (
    "-c",
    """
import sys
from resp_server.programs import serve
from resp_server.serving import appliers
appliers.LISTING_S = appliers.Appliers.__init__.__kwdefaults__["probe_interval_s"] = 3600.0
sys.exit(serve.main())
""",
)


def key_of(job: str, half: int) -> bytes:
    """Return a key of a job that one of the servers owns."""
    keys = (b"%b:n:%d" % (job.encode(), number) for number in range(100))
    return next(key for key in keys if (slot_of(key) > 8191) == bool(half))


class Cluster(Nodes):
    """Two servers that find epochs only when they are told to look, and a proxy."""

    def __init__(self, root: str, folder: Path, stack: ExitStack, *options: str) -> None:
        super().__init__(folder, stack, *HALVES)
        self._root, self._stack = root, stack
        self._writers: dict[str, LogWriter] = {}
        self.publish("job")
        self.servers = [
            stack.enter_context(
                sparkis_server(
                    folder / f"store{at}",
                    root,
                    *("--cluster", str(self.topology), "--cluster-node", f"127.0.0.1:{port}", *options),
                    port=port,
                    program=SERVE_WITHOUT_POLLS,
                )
            )
            for at, port in enumerate(self.ports)
        ]
        self.proxy = stack.enter_context(sparkis_proxy(self.topology, *PATIENT))

    def publish(self, job: str) -> int:
        """Write the number of an epoch into the values of a job, in both halves; tell no server."""
        if job not in self._writers:
            writer = LogWriter(self._root, job, [STATE.for_job(job)])
            self._writers[job] = self._stack.enter_context(writer)
        writer = self._writers[job]
        number = writer.last.epoch + 1 if writer.last else 0
        return writer.publish([Change("n", Op.PUT, key_of(job, half), value=b"%d" % number) for half in range(2)])

    def publish_for_first(self, job: str) -> bytes:
        """Publish an epoch that only the first server is told of; return its values once a client sees them there."""
        epoch = self.publish(job)
        with Client("127.0.0.1", self.servers[0].control_port, password=CONTROL_TOKEN, timeout_s=WAIT_S_MAX) as control:
            control.call("NOTICE", job, str(epoch))
        with self.servers[0].connect() as connection:
            eventually(lambda: connection.call("GET", key_of(job, 0)).value, lambda seen: seen == b"%d" % epoch)
        return b"%d" % epoch


@pytest.fixture(params=[(), ("--workers", "2")], ids=["one process", "two workers"])
def cluster(root: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(root, tmp_path, stack, *request.param)


def exec_over_both(connection: Connection) -> object:
    """Return the values of the job at both servers, in one transaction."""
    connection.call("MULTI")
    for half in range(2):
        connection.call("GET", key_of("job", half))
    reply = connection.call("EXEC")
    return reply.raw if reply.is_error else [each.value for each in reply.value]


def test_server_that_never_polls_finds_epoch_for_which_transaction_at_proxy_waits(cluster: Cluster) -> None:
    with cluster.proxy.connect() as connection:
        for _ in range(3):
            newest = cluster.publish_for_first("job")
            assert connection.call("GET", key_of("job", 0)).value == newest
            assert exec_over_both(connection) == [newest, newest]


@pytest.mark.parametrize("job", ["job", "new"])
def test_server_that_never_polls_finds_epoch_for_which_read_at_proxy_waits(cluster: Cluster, job: str) -> None:
    with cluster.proxy.connect() as connection:
        newest = cluster.publish_for_first(job)
        assert connection.call("GET", key_of(job, 0)).value == newest
        assert connection.call("GET", key_of(job, 1)).value == newest
