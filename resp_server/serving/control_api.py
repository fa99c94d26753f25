"""The control port of a server: RESP for the project's own processes, apart from the clients' port.

    AUTH token                     +OK; any other first request ends the connection (see `token_port`)
    NOTICE job epoch [term]        +OK; the job's applier checks the log at once
    WAIT job epoch timeout_ms      :1 once the epoch is readable, :0 after the timeout
    TOPOLOGY node json             +OK; the server is now this node (an id or host:port) of this topology. An error has
                                   the reason, and then nothing changes
    LEASE linger_s                 +OK; this connection has a driver's lease (see `driver_leases`); an error if the
                                   server already ends
    STOP leases                    :0, and the server ends. With more leases than that: the number of the others, and
                                   the server continues

There are few connections and few requests. Each connection has a task, and its replies are in order.
"""

from __future__ import annotations

import asyncio
import socket

from resp_server.cluster.topology import Topology, TopologyError
from resp_server.cluster.topology_source import TopologySource
from resp_server.limits import DRIVER_CONNECTIONS_MAX
from resp_server.net.tls import Certificates
from resp_server.protocol.errors import GenericError
from resp_server.protocol.replies import OK, Reply, encode
from resp_server.protocol.request_parser import Request
from resp_server.serving.appliers import Appliers
from resp_server.serving.driver_leases import DriverLeases
from resp_server.serving.token_port import AuthenticatedConnection, TokenPort

PROTOCOL = 2
WAIT_MS_MAX = 600_000


class ControlListener:
    """The control port, on the loopback interface."""

    def __init__(
        self,
        appliers: Appliers,
        topology_source: TopologySource,
        token: str,
        certificates: Certificates | None = None,
        driver_leases: DriverLeases | None = None,
    ) -> None:
        def make_connection(writer: asyncio.StreamWriter) -> _Caller:
            return _Caller(appliers, topology_source, driver_leases)

        self._port = TokenPort(
            "the server",
            token,
            make_connection,
            peers_max=DRIVER_CONNECTIONS_MAX,
            protocol=PROTOCOL,
            certificates=certificates,
        )

    async def start(self, port: int = 0) -> int:
        """Listen on a port, 0: on a free one; return the port."""
        listener = socket.create_server(("127.0.0.1", port))
        self._port.start(listener)
        bound: int = listener.getsockname()[1]
        return bound

    async def stop(self) -> None:
        """Stop listening."""
        self._port.close()


class _Caller(AuthenticatedConnection):
    """One authenticated connection."""

    def __init__(self, appliers: Appliers, topology_source: TopologySource, driver_leases: DriverLeases | None) -> None:
        self._appliers = appliers
        self._topology_source = topology_source
        self._driver_leases = driver_leases

    def connection_ended(self) -> None:
        """End the connection's lease."""
        if self._driver_leases is not None:
            self._driver_leases.release(self)

    async def answer(self, request: Request) -> bytes:
        """Return the encoded reply to a request."""
        return encode(await self._answer(request), PROTOCOL)

    async def _answer(self, request: Request) -> Reply:
        try:
            match [bytes(request[0]).upper(), *(bytes(word).decode() for word in request[1:])]:
                case [b"NOTICE", str(job), str(epoch), *_] if len(request) <= 4:
                    await self._appliers.notice(job, int(epoch), *map(int, request[3:]))
                    return OK
                case [b"WAIT", str(job), str(epoch), str(timeout_ms)]:
                    timeout_s = min(int(timeout_ms), WAIT_MS_MAX) / 1000
                    return int(await self._appliers.wait(job, int(epoch), timeout_s))
                case [b"TOPOLOGY", str(node), str(text)]:
                    self._topology_source.take(Topology.parse(text), node)
                    return OK
                case [b"LEASE", str(linger_s)] if self._driver_leases is not None:
                    return OK if self._driver_leases.take(self, float(linger_s)) else GenericError("the server ends")
                case [b"STOP", str(leases)] if self._driver_leases is not None:
                    others = max(0, self._driver_leases.count - int(leases))
                    if not others:
                        self._driver_leases.end()
                    return others
        except TopologyError as error:
            return GenericError(str(error))
        except ValueError:
            pass
        return GenericError("not a request of the control port")
