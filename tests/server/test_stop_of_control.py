"""The control connections of a server that ends while a client waits for a reply."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from resp_server.cluster.topology_source import TopologySource
from resp_server.protocol.replies import encode
from resp_server.serving.control_api import ControlListener


class Appliers:
    """Followers of jobs whose epochs never come."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()

    async def wait(self, job: str, epoch: int, timeout_s: float) -> bool:
        self.is_asked.set()
        await asyncio.Event().wait()
        return False


def test_server_that_ends_during_wait_reports_no_error(capfd: Any) -> None:
    problems: list[Any] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        appliers: Any = Appliers()
        server: Any = None
        listener = ControlListener(appliers, TopologySource(server), "token")
        port = await listener.start()
        peer = socket.create_connection(("127.0.0.1", port))
        with peer:
            peer.sendall(encode([b"AUTH", b"token"], 2) + encode([b"WAIT", b"job", b"1", b"600000"], 2))
            await appliers.is_asked.wait()
            await listener.stop()

    asyncio.run(run())
    assert problems == []
    assert "Traceback" not in capfd.readouterr().err
