"""Runs a fuzz input in one process: against a server or a proxy, over one or two connections, while epochs arrive.

An input is a byte of options, a byte that determines how the rest is cut into chunks, and the rest: the bytes that
clients send. The options:

    1   a password is required          2   the server is a cluster node with half of the slots
    4   the server is still loading     8   the chunks come over two connections in turn
    16  an epoch changes keys after each chunk (with two connections: after one chunk for each)
    32  the clients' user is restricted: it has key patterns, and commands that it may not run
    64  the clients are at a proxy in front of two such nodes (with 2: of two clusters)
    128 the rest of the input is the replies of a proxy's servers; its first byte chooses the clients' requests
        (REQUESTS). With 8 the servers send it without waiting for a request. With 64 it is the replies of a proxy's
        upstream (UPSTREAM_REQUESTS), whose servers reply correctly; with 4 the servers send it, too; with 16 there are
        rules, and an epoch; with 32 the upstream is a Redis Cluster, with 2 and 32 the master that a sentinel knows

For any input, the server has to send complete replies, a protocol error or nothing; become idle; have no internal
error; and retain nothing of a closed client. The clients of a proxy get one complete reply to each request, whatever
the proxy's servers reply.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from threading import get_ident
from typing import Any
from unittest.mock import patch

from compat.conformance.wire import NotAReplyError, Reply, replies_in, requests
from compat.fuzz.loop import Loop, NeverIdleError
from compat.fuzz.swap_target import SWAP_OPTIONS, UPSTREAM_REQUESTS, SwapTarget, is_complete
from compat.fuzz.targets import (
    NODE,
    PASSWORD,
    PROXY,
    SCRIPTED,
    TARGET_OPTIONS,
    TWO,
    ProxyTarget,
    ScriptedReplies,
    Target,
)
from compat.waiting import eventually_async
from resp_server.client.connection import Connection, RateLimitPause

# Starting a server takes longer than most inputs. Until the next start, changes by inputs (users, settings) remain.
INPUTS_PER_SERVER = 8
HEADER_BYTES = 2
# The simulated time after each chunk, for replies and timers.
STEP_S = 0.03
# By the loop's clock: longer than any timeout of a server or a proxy.
TIMEOUT_S = 150.0
# The memory of a parser per received byte: the arguments are Python objects.
PARSER_BYTES_PER_BYTE_MAX = 64
# A server stops sending at this many unread bytes, until its client has read them.
HIGH_WATER_BYTES = 4096
# The requests to a proxy whose servers reply with an input's bytes. The proxy merges or parses these replies.
REQUESTS = [
    [each.split() for each in line.split(b" | ")]
    for line in b"""
GET j:v:1
GET j:v:1 | GET j:v:2 | GET j:v:3 | GET j:v:4
MGET j:v:1 j:v:2 j:v:3 j:v:4
HELLO 3 | MGET j:v:1 j:v:2 j:v:3 j:v:4 | GET j:v:1
HELLO 3 | CLIENT TRACKING ON | MGET j:v:1 j:v:2 j:v:3 j:v:4 | GET j:v:1
EXISTS j:v:1 j:v:2 j:v:3 j:v:4
LRANGE j:l:l 0 -1 | PING | HGETALL j:m:l
DBSIZE | KEYS * | RANDOMKEY
SCAN 0 | SCAN 99999999999
INFO | STATE JOBS | STATE LAG
STATE LIST j | STATE DESCRIBE j | STATE LOCATE j:v:1
WATCH j:v:1 j:v:2 | MULTI | GET j:v:1 | MGET j:v:1 j:v:2 j:v:3 | PING | EXEC
HELLO 3 | MULTI | EXISTS j:v:1 j:v:2 j:v:3 | EXEC
SUBSCRIBE a | PSUBSCRIBE __key*
SSUBSCRIBE a
PUBLISH a b | SPUBLISH a b
""".strip().splitlines()
]
LOGGERS = (logging.getLogger("resp_server"), logging.getLogger("sparkis"))


class FoundError(Exception):
    """A violated invariant."""


class RecordingTransport:
    """A transport that stores its output. Its client, if given, needs a turn of the loop to read much output."""

    def __init__(self, client: asyncio.Protocol | None = None) -> None:
        self.sent: list[bytes] = []
        self.is_closed = self.is_cut = False
        self._client = client
        self._unread_bytes = 0

    def write(self, data: bytes) -> None:
        self.sent.append(data)
        if self._client is not None:
            was_full, self._unread_bytes = self._unread_bytes > HIGH_WATER_BYTES, self._unread_bytes + len(data)
            if self._unread_bytes > HIGH_WATER_BYTES and not was_full:
                self._client.pause_writing()
                asyncio.get_running_loop().call_soon(self._read_all)

    def _read_all(self) -> None:
        self._unread_bytes = 0
        if self._client is not None and not self.is_closed:
            self._client.resume_writing()

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_cut = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 5) if name in ("peername", "sockname") else None

    def get_write_buffer_size(self) -> int:
        return self._unread_bytes

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class ErrorRecorder(logging.Handler):
    """Records errors in a server's log, which are bugs. The process's other threads do not belong to the server."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []
        self._thread = get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread != self._thread:
            return
        if record.exc_info or not record.name.startswith("sparkis"):  # a proxy logs the errors of its servers
            self.records.append(record)


class Subject:
    """Runs inputs on one event loop: several on each server, because starting a server is slow."""

    def __init__(self, inputs_per_server: int = 1) -> None:
        self._inputs_per_server = inputs_per_server
        self._targets: dict[int, Target] = {}
        self._loop = Loop()
        self._loop.set_exception_handler(self._on_exception)
        self._raised: list[BaseException] = []
        gc.collect()  # a server that ran here before may log an error when it is finalized
        self._error_recorder = ErrorRecorder()
        for logger in LOGGERS:
            logger.addHandler(self._error_recorder)
            logger.propagate = False

    def close(self) -> None:
        """Close the servers, the loop and the log."""
        for target in self._targets.values():
            target.close()
        self._end(asyncio.all_tasks(self._loop))
        for logger in LOGGERS:
            logger.removeHandler(self._error_recorder)
            logger.propagate = True
        self._loop.close()

    def history(self, data: bytes) -> list[bytes]:
        """Return all inputs that the server of this input has run, up to this one."""
        target = self._targets.get(_target_options_of(data))
        return [data] if target is None or data[0] & SCRIPTED else target.inputs

    def run(self, data: bytes) -> bytes:
        """Run an input and return the clients' replies; FoundError for a violated invariant."""
        self._raised.clear()
        self._error_recorder.records.clear()
        task = self._loop.create_task(self._run_input(data))
        try:
            sent = self._loop.run_until_complete(task)
        except NeverIdleError as error:
            self._end([task])
            raise FoundError(str(error)) from None
        if self._raised:
            raise FoundError("an exception in the event loop") from self._raised[0]
        for record in self._error_recorder.records:
            cause = record.exc_info[1] if record.exc_info else None
            raise FoundError(f"logged as an error: {record.getMessage()}") from cause
        return sent

    def _end(self, tasks: Collection[asyncio.Task[Any]]) -> None:
        """Cancel tasks and let them end. A task that is only dropped would be finalized during a later input."""
        for task in tasks:
            task.cancel()
        if tasks:
            with suppress(NeverIdleError):
                self._loop.run_until_complete(asyncio.wait(tasks))

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._raised.append(context.get("exception") or RuntimeError(context["message"]))

    async def _run_input(self, data: bytes) -> bytes:
        options, chunk_bytes = (*data[:HEADER_BYTES], 0, 0)[:HEADER_BYTES]
        chunks = list(chunks_of(data[HEADER_BYTES:], chunk_bytes))
        if options & SCRIPTED:
            return await self._run_scripted(options, chunks)
        target = self._target(data)
        await asyncio.sleep(STEP_S)
        transports = await self._send(target, chunks, 2 if options & TWO else 1)
        for transport in transports:
            _replies(transport)
        return b"".join(part for transport in transports for part in transport.sent)

    async def _run_scripted(self, options: int, chunks: Sequence[bytes]) -> bytes:
        """Run a proxy with servers, or an upstream, that send the input as replies."""
        is_swap = bool(options & PROXY)
        choices, target_class = (UPSTREAM_REQUESTS, SwapTarget) if is_swap else (REQUESTS, ProxyTarget)
        chosen = choices[chunks[0][0] % len(choices)] if chunks else choices[0]
        login = [[b"AUTH", b"secret"]] if options & PASSWORD else []
        scripted = ScriptedReplies([chunks[0][1:], *chunks[1:]] if chunks else [], greets=not options & TWO)
        target = target_class(options & (SWAP_OPTIONS if is_swap else PASSWORD | NODE), self._loop, scripted)
        try:
            await asyncio.sleep(STEP_S)
            with patch("resp_server.backends.servers.server_access.LONG_TIMEOUT_S", 2.0):  # else a minute of retries
                (transport,) = await self._send(target, [requests(login + chosen)], 1)
        finally:
            target.close()
        replies = _replies(transport)
        if not transport.is_closed and not is_complete(login + chosen, replies):
            raise FoundError(f"{len(replies)} replies and pushes to the requests {chosen}")
        return b"".join(transport.sent)

    async def _send(self, target: Target, chunks: Sequence[bytes], clients: int) -> list[RecordingTransport]:
        """Let clients send chunks in turn; return their transports."""
        connections = [target.connection() for _ in range(clients)]
        transports = [RecordingTransport(each) for each in connections]
        for connection, transport in zip(connections, transports, strict=True):
            connection.connection_made(transport)  # type: ignore[arg-type]
        try:
            for turn, chunk in enumerate(chunks):
                at = turn % clients
                if not transports[at].is_closed:
                    connections[at].data_received(chunk)
                if at == clients - 1:
                    await self._run_until_idle(connections, transports)
                    target.change(turn)
                    _check_parser_memory(connections, sum(map(len, chunks)))
            await self._run_until_idle(connections, transports)
            for connection, transport in zip(connections, transports, strict=True):
                if not transport.is_closed and not connection.eof_received():
                    transport.close()
            await self._run_until_idle(connections, transports)
        finally:
            for connection in connections:
                connection.connection_lost(None)
        await eventually_async(
            lambda: target.is_idle,
            awaited="the end of a closed client's requests",
            timeout_s=TIMEOUT_S,
            interval_s=STEP_S,
            error=FoundError,
        )
        return transports

    async def _run_until_idle(
        self, connections: Sequence[Connection], transports: Sequence[RecordingTransport]
    ) -> None:
        """Run the loop until connections are idle, except those that wait for a rate limit or a pause."""
        await asyncio.sleep(STEP_S)
        await eventually_async(
            lambda: not any(map(_is_waiting, connections, transports)),
            awaited="the replies to all requests",
            timeout_s=TIMEOUT_S,
            interval_s=STEP_S,
            error=FoundError,
        )

    def _target(self, data: bytes) -> Target:
        """Return the input's target: the one of earlier inputs, or a new one after INPUTS_PER_SERVER inputs."""
        options = _target_options_of(data)
        target = self._targets.get(options)
        if target is None or len(target.inputs) >= self._inputs_per_server:
            if target is not None:
                target.close()
            target_class = ProxyTarget if options & PROXY else Target
            target = self._targets[options] = target_class(options, self._loop)
        target.inputs.append(data)
        return target


def _target_options_of(data: bytes) -> int:
    return data[0] & TARGET_OPTIONS if data else 0


def _is_waiting(connection: Connection, transport: RecordingTransport) -> bool:
    if transport.is_closed:
        return False
    pending = connection.reply.pending
    return (pending is not None and not isinstance(pending, RateLimitPause)) or not connection.output.is_writable


def chunks_of(data: bytes, chunk_bytes: int) -> Iterator[bytes]:
    """Cut data into chunks. chunk_bytes: 0: one chunk; up to 15: the length of each chunk; more: mixed lengths."""
    if not chunk_bytes:
        yield from [data] if data else []
        return
    at, mixed = 0, chunk_bytes
    while at < len(data):
        if chunk_bytes > 15:
            mixed = (mixed * 73 + 41) % 251
        size = 1 + mixed % (16 if chunk_bytes < 128 else 128) if chunk_bytes > 15 else chunk_bytes
        yield data[at : at + size]
        at += size


def _check_parser_memory(connections: Sequence[Connection], sent_bytes: int) -> None:
    buffered = sum(each.input.unparsed_bytes for each in connections)
    if buffered > sent_bytes * PARSER_BYTES_PER_BYTE_MAX:
        raise FoundError(f"the parsers buffer {buffered} bytes of {sent_bytes} that were sent")


def _replies(transport: RecordingTransport) -> list[Reply]:
    """Return a client's replies; none if its connection was aborted, perhaps within a reply."""
    data = b"" if transport.is_cut else b"".join(transport.sent)
    try:
        return replies_in(data)
    except (NotAReplyError, ValueError, IndexError) as error:
        raise FoundError(f"not a sequence of complete replies: {data[-300:]!r}") from error
