"""The master of several serving processes: it accepts connections, passes each to a worker, and manages the workers.

There is one listening socket. The worker with the fewest clients gets the next client. Of several such workers it is
the one that got its last client longest ago. So even a few connections are spread evenly, port 0 works, and only Unix
sockets are needed. Of 50 connections, two processes got 25 and 25 this way, 22 and 28 with SO_REUSEPORT, and 0 and 50
with a shared listener (measured). The master assigns client ids and limits the number of clients.

All workers read the same stores, so all see an epoch as soon as it is committed. All workers switch to another store at
the same moment: each opens it, then all pause, and they resume when the last one has paused. So a client that
reconnects to another worker never sees an older epoch.

    master to worker    {"event": "start", ...}        once, with the whole configuration
                        {"event": "found", "job"}, "update", "forget", "hide"   changes of a job (see `job_catalog`)
                        {"event": "open", "job", "of"}, then "pause", then "serve"; or "drop" if a worker cannot open it
                        {"event": "loading", "is_loading"}, "port"
                        {"event": "topology", "of", "node_id"}            the cluster's topology
                        {"event": "log", "levels", "format"}              what is logged from now on
                        {"event": "drain", "seconds_max"}                 answered once its clients are closed
                        {"event": "settled"}           answered once all earlier lines are handled
                        {"event": "client", "id", "is_tls"}               with a client's socket
                        {"event": "query", "name", "argument"}, "responses"
                        {"event": "users", "rules", "caller"}             the users' new rules; needs a response
    worker to master    {"event": "closed", "id"}      a client has disconnected
                        {"event": "notify", "is_needed"}                  whether its clients need keyspace events
                        {"event": "query", "id", "name", "argument"}        a query to all other workers
                        {"event": "users", "id", "change", "caller"}      a change of users, which the master applies
                        {"event": "response", "id", "response"}           the response to a line with this id
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from resp_server.acl.users import AccessError, RuleLists, Users
from resp_server.cluster.topology import Topology
from resp_server.commands import command_table
from resp_server.metrics.process_stats import ProcessStats
from resp_server.metrics.stats import Stats
from resp_server.net import children
from resp_server.net.children import CRASHES, RestartPause
from resp_server.pipeline.context import GATHER_S_MAX
from resp_server.protocol.errors import GenericError
from resp_server.push.keyspace_notifications import enables_messages
from resp_server.serving.job_catalog import ApplierEvent, JobCatalog
from resp_server.settings.event_classes import classes_of
from resp_server.settings.server import ServerConfig
from resp_server.workers.acceptor import Acceptor
from resp_server.workers.channel import Channel, Line
from resp_server.workers.served_jobs import ServedJobs
from state_backend import log_lines
from state_backend.model.clock import now_ms
from state_backend.model.errors import DescriptorError, SparkisError, StoreError

logger = logging.getLogger("sparkis.server")

# Starting Python and importing modules takes half a second on an idle machine.
START_S_MAX = 60.0

# Opening a store and pausing take milliseconds; a worker that takes longer than this is killed.
OPEN_S_MAX = 10.0
# Shorter than a command's wait for the master.
RESPONSE_S_MAX = GATHER_S_MAX / 2
STOP_S_MAX = 5.0


class WorkerError(SparkisError):
    """A worker ended, or did not respond in time."""


class _Worker:
    """One worker process and the channel to it."""

    def __init__(self, number: int, process: asyncio.subprocess.Process, workers: Workers, end: socket.socket) -> None:
        self.number = number
        self.process = process
        self.clients: set[int] = set()
        self.newest_client = 0
        self.wants_events = workers.wants_events
        self.ended = asyncio.Event()
        self._workers = workers
        self._pending_requests: dict[int, asyncio.Future[Any]] = {}
        self._next_id = 1
        self._channel = Channel(end, self._take, self._channel_closed)

    def send(self, line: Line, passed_socket: socket.socket | None = None) -> None:
        self._channel.send(line, passed_socket)

    async def request(self, line: Line, seconds_max: float) -> Any:
        """Send a line and return the response; WorkerError if none comes in time."""
        if self.ended.is_set():
            raise WorkerError(f"worker {self.number} ended")
        line_id, self._next_id = self._next_id, self._next_id + 1
        response = self._pending_requests[line_id] = asyncio.get_running_loop().create_future()
        self.send({**line, "id": line_id})
        try:
            return await asyncio.wait_for(response, seconds_max)
        except TimeoutError:
            raise WorkerError(f"worker {self.number} did not respond to {line['event']!r} in {seconds_max} s") from None
        finally:
            del self._pending_requests[line_id]

    def terminate(self, reason: object) -> None:
        """Kill the worker's process."""
        logger.error("%s; it is killed", reason)
        with suppress(ProcessLookupError):
            self.process.kill()

    async def stop(self, seconds_max: float) -> None:
        """Stop the worker; it sends its pending replies first."""
        self._channel.close()
        try:
            await asyncio.wait_for(self.process.wait(), seconds_max)
        except TimeoutError:
            with suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()

    def _take(self, line: dict[str, Any], passed_socket: int | None) -> None:
        match line["event"]:
            case "closed":
                self.clients.discard(line["id"])
            case "notify":
                self.wants_events = line["is_needed"]
                self._workers.update_event_interest()
            case "awaited":
                self._workers.on_awaited_epoch(line["job"], line["epoch"], line["term"])
            case "response":
                response = self._pending_requests.get(line["id"])
                if response is not None and not response.done():
                    response.set_result(line["response"])
            case "query":
                self._workers.relay_query(self, line)
            case "users":
                self._workers.change_users(self, line)

    def _channel_closed(self) -> None:
        self.ended.set()
        for response in self._pending_requests.values():
            if not response.done():
                response.set_exception(WorkerError(f"worker {self.number} ended"))
        self._workers.remove_worker(self)


class Workers(JobCatalog):
    """Several processes that serve one port. Runs on the event loop's thread."""

    def __init__(self, config: ServerConfig, count: int) -> None:
        self._config = config
        self._count = count
        self._serving: list[_Worker] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._background_tasks: set[asyncio.Task[Any]] = set()
        self._acceptor = Acceptor(config, self._hand_over, lambda: bool(self._serving))
        self._all_up = asyncio.Event()
        # Held while workers open a store, and while a new worker opens the stores of all jobs.
        self._open_lock = asyncio.Lock()
        self._jobs = ServedJobs()
        self._topology: Line | None = None
        # The fields of ServerConfig that CONFIG SET changed.
        self._configured: dict[str, Any] = {}
        self.wants_events = enables_messages(classes_of(config.notify_keyspace_events))
        self._on_event_demand: Callable[[bool], None] = lambda is_needed: None
        self.on_awaited_epoch: Callable[[str, int, int], None] = lambda job, epoch, term: None
        self._next_id = 1
        self.users = Users(command_table(), config.password, config.aclfile)
        self._stats = Stats()
        self._is_loading = True
        self.run_id = secrets.token_hex(20)
        self.started_ms = now_ms()

    @property
    def port(self) -> int:
        """The port that the master listens on; known after `start`."""
        return self._acceptor.port

    @property
    def tls_port(self) -> int:
        """The TLS port; 0: there is none."""
        return self._acceptor.tls_port

    @property
    def clients_max(self) -> int:
        """The limit of connected clients."""
        return self._config.maxclients

    # -- the server as a whole ----------------------------------------------------------------------------------------

    async def start_processes(self) -> None:
        """Start the workers; SparkisError if they do not start in time."""
        self._tasks = [asyncio.create_task(self._keep_running(number)) for number in range(1, self._count + 1)]
        try:
            await asyncio.wait_for(self._all_up.wait(), START_S_MAX)
        except TimeoutError:
            await self.stop()
            raise SparkisError(f"the {self._count} workers did not start within {START_S_MAX} s") from None

    def set_loading(self, is_loading: bool) -> None:
        """Reply LOADING to commands about keys, or no longer."""
        self._is_loading = is_loading
        self._send_all({"event": "loading", "is_loading": is_loading})

    def set_topology(self, topology: Topology, node_id: str) -> None:
        """Become this node of a cluster. A worker uses the previous topology until the new one reaches it."""
        self._topology = {"event": "topology", "of": topology.to_json(), "node_id": node_id}
        self._send_all(self._topology)

    def watch_event_demand(self, then: Callable[[bool], None]) -> None:
        """Call back now, and on each change, with whether appliers have to store the events of keys."""
        self._on_event_demand = then
        then(self.wants_events)

    def watch_awaited_epochs(self, then: Callable[[str, int, int], None]) -> None:
        """Call back with a job, an epoch and its term, when a request at a proxy waits for this epoch here."""
        self.on_awaited_epoch = then

    def update_event_interest(self) -> None:
        """Notify the appliers whether any worker's clients need keyspace events."""
        if self._serving:
            is_needed = any(worker.wants_events for worker in self._serving)
            if is_needed != self.wants_events:
                self.wants_events = is_needed
                self._on_event_demand(is_needed)

    async def settled(self) -> None:
        """Wait until every worker has handled all lines sent before."""
        await self._request_all(list(self._serving), {"event": "settled"})

    async def start(self) -> None:
        """Listen. OSError if an address cannot be bound."""
        self._acceptor.listen()
        self._send_all(self._ports())
        self._acceptor.set_accepting(bool(self._serving))

    def set_up_log(self, levels: str, line_format: str) -> None:
        """Log with other levels, or in another format, from now on: here and in the workers."""
        log_lines.set_up(levels, line_format)
        self._send_all({"event": "log", "levels": levels, "format": line_format})

    async def drain(self, seconds_max: float) -> None:
        """Stop listening, and have each worker drain its clients; it takes at most this time."""
        ends_s = asyncio.get_running_loop().time() + seconds_max
        await self._acceptor.finish()
        left_s = max(0.0, ends_s - asyncio.get_running_loop().time())
        line = {"event": "drain", "seconds_max": left_s}
        requests = [worker.request(line, left_s + RESPONSE_S_MAX) for worker in self._serving]
        await asyncio.gather(*requests, return_exceptions=True)  # a worker that does not answer is stopped later

    def cut_clients(self) -> None:
        """Close all clients at once."""
        for worker in list(self._serving):
            worker.terminate("the server ends at once")

    async def stop(self) -> None:
        """Stop listening and stop the workers, which send their pending replies."""
        self._acceptor.close()
        for task in (*self._tasks, *self._background_tasks):
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
        self._tasks.clear()

    # -- lines of the appliers ----------------------------------------------------------------------------------------

    def announce(self, job: str) -> None:
        self._jobs.announced(job)
        self._send_all({"event": "found", "job": job})

    async def open(self, job: str, event: ApplierEvent) -> None:
        async with self._open_lock:
            serving = list(self._serving)
            errors = await self._request_all(serving, {"event": "open", "job": job, "of": event})
            error = next(filter(None, errors), None)
            if error is not None:
                self._send_all({"event": "drop", "reason": error["text"], "job": job})
                self._jobs.refused(job, error["text"])
                raise (StoreError if error["is_of_store"] else DescriptorError)(error["text"])
            await self._request_all(serving, {"event": "pause"})
            self._send_all({"event": "serve"})
            self._jobs.opened(job, event)

    def remove(self, job: str) -> None:
        self._jobs.removed(job)
        self._send_all({"event": "forget", "job": job})

    def hide(self, job: str) -> None:
        self._jobs.hidden(job)
        self._send_all({"event": "hide", "job": job})

    def update(self, job: str, update: ApplierEvent) -> None:
        self._jobs.updated(job, update)
        self._send_all({"event": "update", "job": job, "fields": update})

    async def _request_all(self, workers: Sequence[_Worker], line: Line) -> list[Any]:
        """Return the workers' responses; a worker that does not respond is killed, and its response is None."""

        async def request(worker: _Worker) -> Any:
            try:
                return await worker.request(line, OPEN_S_MAX)
            except WorkerError as error:
                if not worker.ended.is_set():
                    worker.terminate(error)
                self.remove_worker(worker)
                return None

        return await asyncio.gather(*map(request, workers))

    # -- workers ------------------------------------------------------------------------------------------------------

    def _send_all(self, line: Line) -> None:
        for worker in self._serving:
            worker.send(line)

    async def _keep_running(self, number: int) -> None:
        pause = RestartPause()
        while True:
            pause.begin_run()
            try:
                await self._run(number)
            except (SparkisError, OSError) as error:
                logger.error("%s", error)
            pause_s = pause.next_s()
            logger.warning("worker %d ended, its clients were disconnected; starting another in %s s", number, pause_s)
            await asyncio.sleep(pause_s)

    async def _run(self, number: int) -> None:
        """Run one worker to its end."""
        worker = await self._start_worker(number)
        try:
            await worker.request(self._start_line(number), START_S_MAX)
            async with self._open_lock:
                await self._catch_up(worker)
            await worker.ended.wait()
        finally:
            self.remove_worker(worker)
            await worker.stop(STOP_S_MAX)
            if -(worker.process.returncode or 0) in CRASHES:
                self._jobs.suspect_stores()

    async def _start_worker(self, number: int) -> _Worker:
        here, there = socket.socketpair()
        with there:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "resp_server.programs.worker", str(there.fileno())),
                pass_fds=(there.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                env=children.environment(),
                start_new_session=True,  # signals to all processes of a shell are for the server, which ends this one
            )
        return _Worker(number, process, self, here)

    def _ports(self) -> Line:
        return {"event": "port", "port": self.port, "tls_port": self.tls_port}

    def _start_line(self, number: int) -> Line:
        limits = tuple(limit.shared_by(self._count) for limit in self._config.rate_limits)
        return {
            "event": "start",
            "number": number,
            "count": self._count,
            "config": asdict(replace(self._config, rate_limits=limits)),
            "run_id": self.run_id,
            "started_ms": self.started_ms,
        }

    async def _catch_up(self, worker: _Worker) -> None:
        """Send a new worker the state of the others; from then on it gets all lines, and clients."""
        for job, event in self._jobs.open_events.items():
            error = await worker.request({"event": "open", "job": job, "of": event}, OPEN_S_MAX)
            if error and error["is_of_store"]:
                raise StoreError(f"worker {worker.number}: {error['text']}")  # the next worker may get another store
            worker.send({"event": "drop", "reason": error["text"], "job": job} if error else {"event": "serve"})
        for line in self._jobs.lines():
            worker.send(line)
        if self._topology is not None:
            worker.send(self._topology)
        await worker.request({"event": "query", "name": "configure", "argument": self._configured}, OPEN_S_MAX)
        worker.send(self._ports())
        worker.send({"event": "loading", "is_loading": self._is_loading})
        worker.send({"event": "users", "rules": self.users.rules, "caller": 0})
        self._serving.append(worker)
        self.update_event_interest()
        if len(self._serving) == self._count:
            self._all_up.set()
        self._acceptor.set_accepting(self._acceptor.is_listening)

    def remove_worker(self, worker: _Worker) -> None:
        """Remove a worker: it gets no more clients and lines."""
        if worker in self._serving:
            self._serving.remove(worker)
            self.update_event_interest()
            self._acceptor.pause_if_unserved()

    # -- clients ------------------------------------------------------------------------------------------------------

    def _hand_over(self, client: socket.socket, is_tls: bool) -> None:
        if sum(len(worker.clients) for worker in self._serving) >= self._config.maxclients:
            self._stats.connections_received += 1
            self._stats.connections_rejected += 1
            client.setblocking(False)
            with client, suppress(OSError):
                if not is_tls:
                    client.send(b"-%b\r\n" % GenericError("max number of clients reached").line)
            return
        if not self._serving:
            client.close()
            return
        worker = min(self._serving, key=lambda each: (len(each.clients), each.newest_client))
        client_id, self._next_id = self._next_id, self._next_id + 1
        worker.clients.add(client_id)
        worker.newest_client = client_id
        worker.send({"event": "client", "id": client_id, "is_tls": is_tls}, client)

    # -- users --------------------------------------------------------------------------------------------------------

    def change_users(self, requester: _Worker, line: Line) -> None:
        """Change users, and apply the change in all workers."""
        outcome = self.users.change(line["change"])
        rules = self.users.rules_of(outcome.names)  # now: a user that is deleted may be made again before they are sent

        async def response() -> None:
            await self._apply_to_workers(rules, line["caller"])
            requester.send({"event": "responses", "id": line["id"], "responses": outcome.to_json()})

        self._run_in_background(response())

    def configure(self, changes: Mapping[str, Any]) -> None:
        """Change settings of all workers, given as fields of ServerConfig."""
        self._note_settings(changes)
        self._run_in_background(self._responses(self._serving, "configure", dict(changes)))

    def _note_settings(self, changes: Mapping[str, Any]) -> None:
        """Record settings that have changed, for workers that start later."""
        self._configured |= changes
        if "password" in changes:
            self.users.set_password(changes["password"])
        if "loglevel" in changes:
            log_lines.set_levels(changes["loglevel"])
        self._config = replace(self._config, **changes)

    def reload_users(self) -> None:
        """Read the ACL file again, for all connections; AccessError if it is invalid: then nothing changes."""
        outcome = self.users.change({"load": True})
        if outcome.error is not None:
            raise AccessError(outcome.error)
        self._run_in_background(self._apply_to_workers(self.users.rules_of(outcome.names), 0))

    async def _apply_to_workers(self, rules: Mapping[str, RuleLists | None], caller: int) -> None:
        """Send changed users to all workers; changes keep their order."""
        line = {"event": "users", "rules": rules, "caller": caller}
        requests = [worker.request(line, RESPONSE_S_MAX) for worker in self._serving]
        for each in await asyncio.gather(*requests, return_exceptions=True):
            if isinstance(each, WorkerError):
                logger.warning("%s; it applies the users' rules as soon as it can", each)

    def _run_in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._background_tasks.add(task)
        task.add_done_callback(self._background_tasks.discard)

    # -- queries ------------------------------------------------------------------------------------------------------

    def relay_query(self, requester: _Worker, line: Line) -> None:
        """Send a worker's query to all others, and return their responses; late ones are left out."""

        async def relay() -> None:
            if line["name"] == "configure":
                self._note_settings(line["argument"])
            if line["name"] == "reset statistics":
                self._stats.reset()
            others = [worker for worker in self._serving if worker is not requester]
            responses = await self._responses(others, line["name"], line["argument"])
            requester.send({"event": "responses", "id": line["id"], "responses": responses})

        self._run_in_background(relay())

    async def query(self, name: str, workers_max: int | None = None) -> list[Any]:
        """Return the responses of all workers, or of a few, to a query; late ones are left out."""
        return await self._responses(self._serving[:workers_max], name, None)

    async def _responses(self, workers: Sequence[_Worker], name: str, argument: Any) -> list[Any]:
        query = {"event": "query", "name": name, "argument": argument}

        async def request(worker: _Worker) -> list[Any]:
            try:
                return [await worker.request(query, RESPONSE_S_MAX)]
            except WorkerError as error:
                logger.warning("%s; %s is answered without it", error, name)
                return []

        responses = [each for some in await asyncio.gather(*map(request, workers)) for each in some]
        if name == "process stats":
            responses.append(ProcessStats.of_this_process(self._stats).to_json())
        return responses
