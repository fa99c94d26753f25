"""`sparkis serve --upstream` as a test starts it: a log, an upstream, and servers with both."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from compat.conformance.servers import (
    Running,
    free_port,
    redis_server,
    sparkis_program,
)
from compat.conformance.wire import Connection
from compat.processes import children_of
from compat.waiting import eventually
from resp_server.net.children import SERVER_PASSWORD_VARIABLE
from state_backend.log.log_writer import LogWriter
from state_backend.model.records import Change, Op
from tests.server.overlay import ABSENT, OLD, STATES, VALUES

PROGRAM = ("-m", "resp_server.programs.serve")


class Scene:
    """A log, and an upstream with an old copy of each key of its states."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        self.log = folder / "log"
        with LogWriter(self.log, "job", STATES, "first") as writer:
            writer.publish(
                [
                    Change("speed" if key.startswith(b"job:") else "apdex", Op.PUT, key, value=value)
                    for key, value in VALUES.items()
                ]
            )
        self.port = free_port()
        self.start_upstream()

    def start_upstream(self) -> None:
        """Start the upstream; again, after it was killed."""
        folder = self.folder / "upstream"
        folder.mkdir(exist_ok=True)
        self.upstream = self._stack.enter_context(redis_server(folder, port=self.port))
        with self.upstream.connect() as connection:
            connection.call("MSET", *(word for key in [*VALUES, ABSENT] for word in (key, OLD)))

    def options(self, name: str) -> list[str]:
        """Return the options of a server with its own files."""
        files = ("--store", str(self.folder / name), "--ownership", str(self.folder / f"{name}.json"))
        return ["--log", str(self.log), *files, "--upstream", f"redis://127.0.0.1:{self.port}"]

    def start(self, name: str, *options: str) -> Running:
        """Start a server as a driver does, on a free port."""
        program = sparkis_program(PROGRAM, "--port", "0", *self.options(name), *options)
        return self._stack.enter_context(program)


def children(pid: int) -> list[int]:
    return list(children_of(pid))


def state_server_of(pid: int) -> int:
    """Return the process id of a proxy's state server."""
    (found,) = children(pid)
    return found


def wait_until_ready(client: Connection) -> None:
    for key, value in VALUES.items():
        eventually(lambda key=key: client.call("GET", key).plain, lambda found, is_=value: found == is_)  # type: ignore[misc]
    eventually(lambda: not client.call("GET", "nobody's").is_error)


class StateServer:
    """The state server behind a proxy, and its counts of calls."""

    def __init__(self, proxy: Running, client: Connection) -> None:
        self.pid = state_server_of(proxy.process.pid)
        fields = dict(
            field.split("=", 1) for field in Path(f"/proc/{self.pid}/environ").read_text().split("\0") if "=" in field
        )
        info = client.call("INFO", "proxy").plain.decode()
        port = int(info.partition("server0:addr=127.0.0.1:")[2].partition(",")[0])
        self.connection = Connection(port)
        self.connection.call("AUTH", fields[SERVER_PASSWORD_VARIABLE])

    def gets(self) -> int:
        """Return the number of GETs that the state server has answered."""
        found = self.connection.call("INFO", "commandstats").plain.decode().partition("cmdstat_get:calls=")[2]
        return int(found.partition(",")[0] or 0)

    def is_spared(self, client: Connection, key: str) -> bool:
        """Return whether the proxy answers a GET of a stored key itself."""
        there = self.gets()
        return client.call("GET", key).plain is not None and self.gets() == there
