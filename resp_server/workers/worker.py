"""A worker: a process that serves clients which its master hands over. The master starts it.

    python -m resp_server.workers.worker DESCRIPTOR      of the line to the master (see `workers`)

It shows what the master tells it to show, and ends with the line.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvloop

from resp_server.acl.rate_limits import RateLimit
from resp_server.acl.users import Change
from resp_server.client.connection import Connection
from resp_server.cluster.topology import Topology
from resp_server.config import ServerConfig
from resp_server.net.listeners import make_room_for
from resp_server.net.tls import Certificates, TlsError, TlsFiles
from resp_server.protocol.replies import Pending
from resp_server.serving.job_catalog import LocalJobCatalog
from resp_server.serving.server import Server
from resp_server.workers.channel import Channel
from state_backend.model.errors import SparkisError, StoreError
from state_backend.store.keyspace import Job, Keyspace

logger = logging.getLogger("sparkis.server")

# The master waits shorter than this for a worker before it goes on without it.
STILL_S_MAX = 30.0


class Worker:
    """What a worker does with the lines of its master."""

    def __init__(self, end: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._keyspace = Keyspace()
        self._jobs = LocalJobCatalog(self._keyspace)
        self._server: Server | None = None
        self._certificates: Certificates | None = None
        self._prepared: Job | None = None
        self._is_still = False
        self._asked: dict[int, Callable[[Any], None]] = {}
        self._next_id = 1
        self._arriving: set[asyncio.Task[None]] = set()
        self._is_over = asyncio.Event()
        self._channel = Channel(end, self._take, self._is_over.set)

    async def run(self) -> None:
        """Serve until the line to the master ends, or SIGTERM comes."""
        self._loop.add_signal_handler(signal.SIGTERM, self._is_over.set)
        gc.freeze()  # as in `process.until_told_to_end`
        await self._is_over.wait()
        if self._server is not None:
            await self._server.stop()

    @property
    def server(self) -> Server:
        """The server, which the first line makes."""
        assert self._server is not None
        return self._server

    def _take(self, line: dict[str, Any], handed: int | None) -> None:
        match line["event"]:
            case "start":
                try:
                    self._start(line)
                except TlsError as error:  # the master goes on without this worker, and starts it again
                    logger.error("%s; this worker ends", error)
                    self._channel.close()
                    return
                self._answer(line, None)
            case "client":
                self._welcome(line["id"], handed, line["is_tls"])
            case "ask":
                self._answer_question(line)
            case "users":
                self._take_users(line)
            case "answers":
                self._asked.pop(line["id"])(line["answers"])
            case "loading":
                self.server.set_loading(line["is_loading"])
            case "topology":
                self.server.set_topology(Topology.of_json(line["of"]), line["node_id"])
            case "settled":
                self._answer(line, None)
            case "port":
                self.server.context.process.port, self.server.context.process.tls_port = line["port"], line["tls_port"]
            case _:
                self._take_of_job(line)

    def _take_of_job(self, line: dict[str, Any]) -> None:
        match line["event"]:
            case "found":
                self._keyspace.refuse(line["job"], line.get("reason"))
            case "told":
                self._jobs.tell(line["job"], line["known"])
            case "forget":
                self._jobs.forget(line["job"])
            case "hide":
                self._jobs.hide(line["job"])
            case "open":
                self._answer(line, self._open(line))
            case "hold":
                self._answer(line, None)
                self._hold()
            case "show":
                assert self._prepared is not None
                self._jobs.show(self._prepared)
                self._prepared, self._is_still = None, False
            case "drop":
                if self._prepared is not None:
                    self._jobs.drop(self._prepared)
                self._jobs.refuse(line["job"], line["reason"])
                self._prepared = None

    def _answer_question(self, line: dict[str, Any]) -> None:
        question = self.server.context.table.questions[line["question"]]
        answer = question.answer(self.server.context, line["argument"])
        if isinstance(answer, Pending):
            answer.when_resolved(lambda: self._answer(line, answer.make()))
        else:
            self._answer(line, answer)

    def _answer(self, line: dict[str, Any], answer: Any) -> None:
        self._channel.send({"event": "answer", "id": line["id"], "answer": answer})

    def _start(self, line: dict[str, Any]) -> None:
        name = f"sparkis.worker.{line['number']}"
        logging.basicConfig(
            level=line["level"], format=f"%(asctime)s %(levelname)s {name}: %(message)s", stream=sys.stderr
        )
        given = line["config"]
        tls = None if given["tls"] is None else TlsFiles(**given["tls"])
        limits = tuple(RateLimit(**each) for each in given["limits"])
        config = ServerConfig(**{**given, "hosts": tuple(given["hosts"]), "tls": tls, "limits": limits})
        self._certificates = None if tls is None else Certificates(tls)
        make_room_for(config.clients_max)
        server = self._server = Server(self._keyspace, config)
        server.context.process.run_id = line["run_id"]
        server.context.process.started_ms = line["started_ms"]
        server.context.process.process_id = os.getppid()
        server.context.slow_requests.log.number_as(line["number"] - 1, line["count"])
        server.context.peers = self
        server.watch_event_demand(self._want_events)
        server.begin_polling()
        server.start_sweeping()

    def _take_users(self, line: dict[str, Any]) -> None:
        self.server.context.users.adopt(line["rules"])
        self.server.context.apply_user_changes(line["caller"])
        if "id" in line:
            self._answer(line, None)

    def _open(self, line: dict[str, Any]) -> dict[str, Any] | None:
        """Open a store without showing it; return why that is not possible."""
        try:
            self._prepared = self._jobs.prepare(line["job"], line["of"])
        except SparkisError as error:
            return {"text": str(error), "is_of_store": isinstance(error, StoreError)}
        return None

    def _hold(self) -> None:
        """Answer nobody until all workers can show what was opened: nobody is to see the store before after it."""
        self._is_still = True
        if not self._channel.stand_still(lambda: not self._is_still, STILL_S_MAX):
            logger.error("the master said nothing for %s s; this worker ends", STILL_S_MAX)
            self._channel.close()

    # -- clients ------------------------------------------------------------------------------------------------------

    def _welcome(self, client_id: int, descriptor: int | None, is_tls: bool) -> None:
        if descriptor is None:
            logger.error("a connection was lost: this process may have no more open files (ulimit -n)")
            self._left(client_id)
            return
        certificates = self._certificates if is_tls else None
        task = self._loop.create_task(self._connect(client_id, socket.socket(fileno=descriptor), certificates))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    async def _connect(self, client_id: int, client: socket.socket, certificates: Certificates | None) -> None:
        client.setblocking(False)

        def handed() -> _Handed:
            return _Handed(self.server, client_id, self._left)

        try:
            if not await self.server.take(client, handed, certificates):
                self._left(client_id)
        except OSError as error:
            logger.debug("client %d went before it was taken in: %s", client_id, error)
            client.close()
            self._left(client_id)

    def _left(self, client_id: int) -> None:
        self._channel.send({"event": "left", "id": client_id})

    def _want_events(self, is_wanted: bool) -> None:
        self._channel.send({"event": "notify", "is_wanted": is_wanted})

    # -- the other processes (see `push.clients.PeerProcesses`) -------------------------------------------------------

    def query(self, question: str, argument: Any, then: Callable[[list[Any]], None]) -> None:
        query_id, self._next_id = self._next_id, self._next_id + 1
        self._asked[query_id] = then
        self._channel.send({"event": "ask", "id": query_id, "question": question, "argument": argument})

    def change_users(self, change: Change, caller_id: int, then: Callable[[dict[str, Any]], None]) -> None:
        query_id, self._next_id = self._next_id, self._next_id + 1
        self._asked[query_id] = then
        self._channel.send({"event": "users", "id": query_id, "change": change, "caller": caller_id})


class _Handed(Connection):
    """A connection that the master handed over, and is told the end of."""

    def __init__(self, server: Server, client_id: int, left: Callable[[int], None]) -> None:
        super().__init__(server, client_id)
        self._client_id = client_id
        self._left = left

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._left(self._client_id)


async def _run(descriptor: int) -> None:
    await Worker(socket.socket(fileno=descriptor)).run()


def main() -> None:
    """Run a worker until its line ends."""
    for number in (signal.SIGINT, signal.SIGHUP):  # a shell sends them to all: they are the master's to handle
        signal.signal(number, signal.SIG_IGN)
    uvloop.run(_run(int(sys.argv[1])))


if __name__ == "__main__":
    main()
