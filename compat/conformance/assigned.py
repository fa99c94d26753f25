"""State servers whose slots a registry assigns."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path

from compat.conformance.servers import Running, sparkis_program
from compat.waiting import eventually


class Assigned:
    """State servers of a log, and the registry that assigns their slots."""

    def __init__(self, folder: Path, log: Path, replicas: int, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._log = folder / "log"
        shutil.copytree(log, self._log)  # the registry writes into it
        self._run("registry", "--port", "0", "--replicas", str(replicas))
        self.servers: list[Running] = []

    def _run(self, program: str, *options: str) -> Running:
        given = ("--log", str(self._log), *options)
        return self._stack.enter_context(sparkis_program(("-m", f"resp_server.programs.{program}"), *given))

    def start(self) -> None:
        """Start another server."""
        self.servers.append(self._run("state_server", "--port", "0", "--store", str(self._folder / str(self.count))))

    @property
    def count(self) -> int:
        """The number of servers that were started."""
        return len(self.servers)

    def port(self, at: int) -> int:
        """Return where a server is."""
        return self.servers[at].port

    def kill(self, at: int) -> None:
        """Kill a server."""
        self.servers[at].process.kill()
        self.servers[at].process.wait()

    def nodes(self) -> dict[int, str]:
        """Return what the registry shows of each server that is well: its slots, or that it is a replica."""
        topology = json.loads((self._log / "registry.json").read_text())["topology"] or {"nodes": []}
        numbers = {server.port: at for at, server in enumerate(self.servers)}
        return {
            numbers[node["port"]]: "replica" if "replica_of" in node else node.get("slots", "")
            for node in topology["nodes"]
            if node.get("health", "online") == "online"
        }

    def wait_for(self, *expected: str) -> None:
        """Wait until servers have these slots; `gone` is one that was killed."""
        wanted = {at: slots for at, slots in enumerate(expected) if slots != "gone"}
        eventually(self.nodes, lambda found: found == wanted, f"{wanted} is waited for")
