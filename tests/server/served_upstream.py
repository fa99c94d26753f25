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
