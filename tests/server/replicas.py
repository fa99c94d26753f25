"""Two servers of a job, of which the second may be a replica, and a proxy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from compat.conformance.servers import (
    CONTROL_TOKEN,
    Running,
    child_environment,
    wait_for_keys,
)
from compat.conformance.wire import Connection
from compat.waiting import WAIT_S_MAX, eventually
from state_backend.log.epochs import EpochContent
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op, runs_of
from state_backend.model.slots import slot_of
from tests.server.nodes import Nodes

KEYS = 60


class Job:
    """A job whose values are the epoch that wrote them."""

    def __init__(self, root: Path, name: str, key_format: str | None = None) -> None:
        key = {"key": "k"} if key_format is None else {"key_format": key_format}
        states = [StateDescriptor("value", value="v", **key)]
        self.writer = LogWriter(root, name, states)
        self.keys = [(key_format or f"{name}:value:<k>").replace("<k>", f"{each}").encode() for each in range(KEYS)]
        self.epoch = -1
        self.publish()

    def publish(self, values: dict[bytes, bytes] | None = None) -> None:
        self.epoch += 1
        values = values or dict.fromkeys(self.keys, b"%d" % self.epoch)
        changes = [Change("value", Op.PUT, key, value=value) for key, value in values.items()]
        file, inline = self.writer.change_files(self.epoch).write(runs_of(changes, ["value"]))
        self.writer.commit(
            self.epoch,
            EpochContent(files=[file] if file else [], inline=[inline] if inline else [], rows=0, digest=0),
            clock_ms=self.epoch + 1,
        )


def tell(server: Running, job: Job, name: str) -> None:
    """Have a server look at the log now."""
    with Connection(server.control_port) as connection:
        connection.call("AUTH", CONTROL_TOKEN)
        connection.call("NOTICE", name, str(job.epoch))


class Cluster(Nodes):
    """Two servers of a log, of which the second may be a replica, and a proxy."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        *rows: dict[str, str],
        patience_ms: int = 60_000,
        options: Sequence[str] = (),
    ) -> None:
        super().__init__(folder, stack, *rows)
        self.job = Job(self.log, "j")
        self.servers = [self.start(at, *options) for at in range(len(rows))]
        self.proxy = self.start_proxy("--server-timeout", str(patience_ms))
        wait_for_keys(self.proxy, KEYS)

    @property
    def value(self) -> bytes:
        """The value of all keys in the newest epoch."""
        return b"%d" % self.job.epoch

    def key_of(self, half: int) -> bytes:
        """Return a key in one half of the slots."""
        return next(key for key in self.job.keys if slot_of(key) // 8192 == half)

    def move(self, connection: Connection, *rows: dict[str, str]) -> None:
        """Write a new topology and wait until the proxy of a connection has it."""
        self.write_topology(*rows)
        shown = b"topology_version:%d\r\n" % self.version
        eventually(lambda: shown in bytes(connection.call("INFO", "proxy").plain), awaited="the slots are moved")

    def proxy_of(self, patience_ms: int) -> Running:
        """Start another proxy, which waits for a server no longer than this."""
        proxy = self.start_proxy("--server-timeout", str(patience_ms))
        wait_for_keys(proxy, KEYS)
        return proxy

    def shows(self, at: int) -> bool:
        """Return whether one of the servers shows the newest epoch."""
        with self.servers[at].connect() as direct:
            (lag,) = direct.call("STATE", "LAG").plain
        return dict(zip(lag[::2], lag[1::2], strict=True))[b"applied"] == self.job.epoch

    def publish(self, *servers: int) -> None:
        self.job.publish()
        for at in servers:
            tell(self.servers[at], self.job, "j")


MASTER_AND_REPLICA = ({"slots": "0-16383"}, {"replica_of": "the first"})


def start_program(stack: ExitStack, module: str, *options: str) -> Running:
    """Start one of our processes, which is told the token."""
    command = [sys.executable, "-m", module, "--child", "--loglevel", "error", *options]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment() | {"SPARKIS_CONTROL_TOKEN": CONTROL_TOKEN},
    )
    stack.callback(_end, process)
    assert process.stdout is not None
    return Running(json.loads(process.stdout.readline())["port"], process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(WAIT_S_MAX)
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()


PROXY = ("resp_server.programs.proxy", "--port", "0", "--bind", "127.0.0.1")


def wait_for(proxy: Running, keys: int) -> None:
    with proxy.connect() as connection:
        eventually(lambda: connection.call("DBSIZE").plain == keys, awaited="the keys are there")
