"""A worker: a process that serves the clients that the master passes to it (see `programs.worker`).

It serves the jobs that the master names, and ends when the channel closes.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
from collections.abc import Callable
from typing import Any

from resp_server.acl.rate_limits import RateLimit
from resp_server.acl.users import UserChange
from resp_server.client.connection import Connection
from resp_server.cluster.topology import Topology
from resp_server.net.listeners import raise_file_limit
from resp_server.net.tls import Certificates, TlsError, TlsFiles
from resp_server.pipeline.context import ServerContext
from resp_server.pipeline.pipeline import Pipeline
from resp_server.protocol.replies import Pending
from resp_server.push.clients import OtherWorkers
from resp_server.serving.job_catalog import LocalJobCatalog
from resp_server.serving.server import Server
from resp_server.settings.server import ServerConfig
from resp_server.workers.channel import Channel
from state_backend import log_lines
from state_backend.model.errors import SparkisError, StoreError
from state_backend.store.keyspace import Job, Keyspace

logger = logging.getLogger("sparkis.server")

# Longer than the master's own timeout for a worker.
PAUSED_S_MAX = 30.0


class Worker(OtherWorkers):
    """Handles the lines of the master.

    Args:
        end: The worker's end of the channel to the master.
        pipeline: Makes the pipeline that answers the requests, for a context.
    """

    def __init__(self, end: socket.socket, pipeline: Callable[[ServerContext], Pipeline]) -> None:
        self._loop = asyncio.get_running_loop()
        self._keyspace, self._pipeline = Keyspace(), pipeline
        self._jobs = LocalJobCatalog(self._keyspace)
        self._server: Server | None = None
        self._certificates: Certificates | None = None
        self._opened_job: Job | None = None
        self._is_paused = False
        self._pending_requests: dict[int, Callable[[Any], None]] = {}
        self._next_id = 1
        self._handshakes: set[asyncio.Task[None]] = set()
        self._name = ""  # of this process in log lines
        self._draining: asyncio.Task[None] | None = None
        self._is_finished = asyncio.Event()
        self._channel = Channel(end, self._take, self._is_finished.set)

    async def run(self) -> None:
        """Serve until the channel to the master closes."""
        gc.freeze()  # as in `programs.listening.Shutdown`
        await self._is_finished.wait()
        if self._server is not None:
            await self._server.stop()

    @property
    def server(self) -> Server:
        """The server; the first line makes it."""
        assert self._server is not None
        return self._server

    def _take(self, line: dict[str, Any], passed_socket: int | None) -> None:
        match line["event"]:
            case "start":
                try:
                    self._start(line)
                except TlsError as error:  # the master continues without this worker, and restarts it
                    logger.error("%s; this worker ends", error)
                    self._channel.close()
                    return
                self._respond(line, None)
            case "client":
                self._accept_client(line["id"], passed_socket, line["is_tls"])
            case "query":
                self._answer_query(line)
            case "users":
                self._apply_users(line)
            case "responses":
                self._pending_requests.pop(line["id"])(line["responses"])
            case "loading":
                self.server.set_loading(line["is_loading"])
            case "topology":
                self.server.set_topology(Topology.of_json(line["of"]), line["node_id"])
            case "log":
                log_lines.set_up(line["levels"], line["format"], self._name)
            case "drain":
                self._draining = self._loop.create_task(self._drain(line))
            case "settled":
                self._respond(line, None)
            case "port":
                self.server.context.process.port, self.server.context.process.tls_port = line["port"], line["tls_port"]
            case _:
                self._handle_job_line(line)

    async def _drain(self, line: dict[str, Any]) -> None:
        ends_s = self._loop.time() + line["seconds_max"]
        if self._handshakes:
            await asyncio.wait(self._handshakes, timeout=line["seconds_max"])
        await self.server.drain(max(0.0, ends_s - self._loop.time()))
        self._respond(line, None)

    def _handle_job_line(self, line: dict[str, Any]) -> None:
        match line["event"]:
            case "found":
                self._keyspace.refuse(line["job"], line.get("reason"))
            case "update":
                self._jobs.update(line["job"], line["fields"])
            case "forget":
                self._jobs.remove(line["job"])
            case "hide":
                self._jobs.hide(line["job"])
            case "open":
                self._respond(line, self._open(line))
            case "pause":
                self._respond(line, None)
                self._pause_until_served()
            case "serve":
                assert self._opened_job is not None
                self._jobs.serve(self._opened_job)
                self._opened_job, self._is_paused = None, False
            case "drop":
                if self._opened_job is not None:
                    self._jobs.drop(self._opened_job)
                self._jobs.refuse(line["job"], line["reason"])
                self._opened_job = None

    def _answer_query(self, line: dict[str, Any]) -> None:
        query = self.server.context.table.worker_queries[line["name"]]
        response = query.respond(self.server.context, line["argument"])
        if isinstance(response, Pending):
            response.when_resolved(lambda: self._respond(line, response.make()))
        else:
            self._respond(line, response)

    def _respond(self, line: dict[str, Any], response: Any) -> None:
        self._channel.send({"event": "response", "id": line["id"], "response": response})

    def _start(self, line: dict[str, Any]) -> None:
        self._name = f"sparkis.worker.{line['number']}"
        log_lines.set_up_child(self._name)
        fields = line["config"]
        tls = None if fields["tls"] is None else TlsFiles(**fields["tls"])
        limits = tuple(RateLimit(**each) for each in fields["rate_limits"])
        config = ServerConfig(**{**fields, "hosts": tuple(fields["hosts"]), "tls": tls, "rate_limits": limits})
        self._certificates = None if tls is None else Certificates(tls)
        raise_file_limit(config.maxclients)
        server = self._server = Server(self._keyspace, config, self._pipeline, has_peer_processes=True)
        server.context.process.run_id = line["run_id"]
        server.context.process.started_ms = line["started_ms"]
        server.context.process.process_id = os.getppid()
        server.context.observation.slow_requests.log.set_id_sequence(line["number"] - 1, line["count"])
        server.context.workers = self
        server.watch_event_demand(self._request_events)
        server.watch_awaited_epochs(self._await_epoch)
        server.begin_polling()
        server.start_sweeping()

    def _apply_users(self, line: dict[str, Any]) -> None:
        self.server.context.users.adopt(line["rules"])
        self.server.context.apply_user_changes(line["caller"])
        if "id" in line:
            self._respond(line, None)

    def _open(self, line: dict[str, Any]) -> dict[str, Any] | None:
        """Open a store without serving it yet; return the error, or None."""
        try:
            self._opened_job = self._jobs.prepare(line["job"], line["of"])
        except SparkisError as error:
            return {"text": str(error), "is_of_store": isinstance(error, StoreError)}
        return None

    def _pause_until_served(self) -> None:
        """Pause until all workers have opened the store: no client may read the old store after the new one."""
        self._is_paused = True
        if not self._channel.block_until(lambda: not self._is_paused, PAUSED_S_MAX):
            logger.error("no line came from the master for %s s; this worker ends", PAUSED_S_MAX)
            self._channel.close()

    # -- clients ------------------------------------------------------------------------------------------------------

    def _accept_client(self, client_id: int, descriptor: int | None, is_tls: bool) -> None:
        if descriptor is None:
            logger.error("a connection was lost: this process may have no more open files (ulimit -n)")
            self._client_closed(client_id)
            return
        certificates = self._certificates if is_tls else None
        task = self._loop.create_task(self._connect(client_id, socket.socket(fileno=descriptor), certificates))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _connect(self, client_id: int, client: socket.socket, certificates: Certificates | None) -> None:
        client.setblocking(False)

        def new_connection() -> _WorkerConnection:
            return _WorkerConnection(self.server, client_id, self._client_closed)

        try:
            if not await self.server.take(client, new_connection, certificates):
                self._client_closed(client_id)
        except OSError as error:
            logger.debug("client %d disconnected before it was accepted: %s", client_id, error)
            client.close()
            self._client_closed(client_id)

    def _client_closed(self, client_id: int) -> None:
        self._channel.send({"event": "closed", "id": client_id})

    def _request_events(self, is_needed: bool) -> None:
        self._channel.send({"event": "notify", "is_needed": is_needed})

    def _await_epoch(self, job: str, epoch: int, term: int) -> None:
        self._channel.send({"event": "awaited", "job": job, "epoch": epoch, "term": term})

    # -- the other processes (see `push.clients.OtherWorkers`) -------------------------------------------------------

    def query(self, name: str, argument: Any, then: Callable[[list[Any]], None]) -> None:
        query_id, self._next_id = self._next_id, self._next_id + 1
        self._pending_requests[query_id] = then
        self._channel.send({"event": "query", "id": query_id, "name": name, "argument": argument})

    def change_users(self, change: UserChange, caller_id: int, then: Callable[[dict[str, Any]], None]) -> None:
        query_id, self._next_id = self._next_id, self._next_id + 1
        self._pending_requests[query_id] = then
        self._channel.send({"event": "users", "id": query_id, "change": change, "caller": caller_id})


class _WorkerConnection(Connection):
    """A connection that the master passed to this worker; the master is notified of its end."""

    __slots__ = ("_client_closed", "_client_id")

    def __init__(self, server: Server, client_id: int, on_closed: Callable[[int], None]) -> None:
        super().__init__(server, client_id)
        self._client_id = client_id
        self._client_closed = on_closed

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._client_closed(self._client_id)
