"""The HTTP listener of metrics and health. It has its own small handler, on the event loop of the server.

    GET /metrics     the values, in the format of OpenMetrics, or of Prometheus if the client asks for it
    GET /livez       200 as long as the event loop runs
    GET /readyz      200 if clients may come, else 503; the body says why

It has no TLS and no passwords: it shows the names of jobs and states, but no key and no value. A connection has one
request. A scrape takes the facts on the loop, where they are consistent, and makes their text in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus

from resp_server.exporter.exposition import Text, text_of
from resp_server.exporter.sources import Readiness, Source
from resp_server.net.addresses import address_of
from resp_server.net.listeners import listen
from resp_server.protocol.errors import internal_error
from state_backend.model.clock import MS_PER_S

logger = logging.getLogger("sparkis.metrics")

REQUEST_BYTES_MAX = 16 << 10
# From the first byte of a request to the last one of its reply; Prometheus waits 10 s.
REQUEST_S_MAX = 10.0
CONNECTIONS_MAX = 32
PLAIN = "text/plain; charset=utf-8"
NOT_FOUND = "there are /metrics, /livez and /readyz\n"


class RequestError(Exception):
    """A request that gets this status."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class MetricsListener:
    """Answers HTTP requests about a program.

    Args:
        address: The host and the port, 0 for a free one; None: it does not listen.
        lag_s_max: The longest lag of a job with which the program is ready; None: any.
    """

    def __init__(self, source: Source, address: tuple[str, int] | None, lag_s_max: float | None = None) -> None:
        self._source = source
        self._address = address
        self._lag_s_max = lag_s_max
        self._is_draining = False
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._one_scrape = asyncio.Lock()
        self.port = 0

    async def start(self) -> None:
        """Listen, if there is an address. OSError if it cannot be bound."""
        if self._address is None:
            return
        host, port = self._address
        for each in listen([host], port, CONNECTIONS_MAX):
            self._servers.append(await asyncio.start_server(self._connected, sock=each, limit=REQUEST_BYTES_MAX))
        self.port = self._servers[0].sockets[0].getsockname()[1]
        logger.info("metrics @ http://%s/metrics", address_of(host, self.port))

    def drain(self) -> None:
        """Answer from now on that no more clients may come."""
        self._is_draining = True

    async def stop(self) -> None:
        """Stop listening, and cut the open connections."""
        for server in self._servers:
            server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def not_ready(self) -> list[str]:
        """Return the reasons why clients should not come; none: they may."""
        if self._is_draining:
            return ["draining"]
        return reasons_of(await self._source.readiness(), self._lag_s_max)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._connections) >= CONNECTIONS_MAX:
            writer.close()
            return
        self._connections.add(task)
        try:
            async with asyncio.timeout(REQUEST_S_MAX):
                writer.write(await self._reply(reader))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, EOFError, asyncio.LimitOverrunError):
            pass  # the client is gone, slow, or speaks something else
        finally:
            self._connections.discard(task)
            writer.close()

    async def _reply(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        method, path, headers = _parsed(head)
        try:
            if method not in ("GET", "HEAD"):
                raise RequestError(HTTPStatus.METHOD_NOT_ALLOWED, "there are only GET and HEAD\n")
            status, text = await self._answer(path, headers.get("accept", ""))
        except RequestError as error:
            status, text = error.status, _plain(str(error))
        except Exception as error:
            status, text = HTTPStatus.INTERNAL_SERVER_ERROR, _plain(f"{internal_error(error)}\n")
        return _response(status, text, has_body=method != "HEAD")

    async def _answer(self, path: str, accept: str) -> tuple[HTTPStatus, Text]:
        match path.partition("?")[0]:
            case "/metrics":
                async with self._one_scrape:
                    scrape = await self._source.scrape()
                    scrape.add("ready", not await self.not_ready())
                    return HTTPStatus.OK, await asyncio.to_thread(text_of, scrape, accept)
            case "/livez":
                return HTTPStatus.OK, _plain("ok\n")
            case "/readyz":
                reasons = await self.not_ready()
                status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
                return status, _plain("".join(f"{reason}\n" for reason in reasons) or "ok\n")
        raise RequestError(HTTPStatus.NOT_FOUND, NOT_FOUND)


def reasons_of(facts: Readiness, lag_s_max: float | None) -> list[str]:
    """Return the reasons why a server with these facts is not ready."""
    if facts.is_loading:
        return ["loading"]
    if lag_s_max is None:
        return []
    return [
        f"job {job}: no epoch is visible yet" if lag_ms is None else f"job {job}: {lag_ms / MS_PER_S:g} s behind"
        for job, lag_ms in facts.lags_ms.items()
        if lag_ms is None or lag_ms > lag_s_max * MS_PER_S
    ]


def _parsed(head: bytes) -> tuple[str, str, dict[str, str]]:
    """Return the method, the target and the headers of a request. Other input has texts that get 405 or 404."""
    first, *lines = head.decode("latin-1").split("\r\n")
    method, _, rest = first.partition(" ")
    pairs = (line.partition(":") for line in lines if ":" in line)
    return method, rest.partition(" ")[0], {name.strip().lower(): value.strip() for name, _, value in pairs}


def _plain(text: str) -> Text:
    return Text(PLAIN, text.encode())


def _response(status: HTTPStatus, text: Text, *, has_body: bool) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {text.content_type}\r\n"
        f"Content-Length: {len(text.body)}\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (text.body if has_body else b"")
