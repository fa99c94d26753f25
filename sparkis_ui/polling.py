"""One polling loop for each user of the endpoint, however many tabs are open.

Once a second a loop reads the facts that pages have wanted in the last seconds. It ends after a minute without a tab.
Tabs with the same URL share the reads of a turn (`Hub.once`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sparkis_ui import facts
from sparkis_ui.client import Client, Endpoint, LostError, RefusedError, RequestError, SignInError
from sparkis_ui.watching import Watcher

Found = TypeVar("Found")

TURN_S = 1.0
REST_AFTER_S = 60.0  # without a tab
WANTED_S = 10.0  # facts that no page has wanted for this time are not read
POINTS = 300  # five minutes of graphs
POINTS_MIN = 60  # the width of a graph that has fewer
MOVES_MAX = 50
FIRST_WAIT_S_MAX = 4.0
SLOWLOG_MAX = 64
CLIENTS_LISTED_MAX = 1000  # with more, CLIENT LIST would be long: its page says so
JOBS_LISTED_MAX = 200  # jobs whose states are listed
# The groups of facts, and the number of turns between two reads of each.
TURNS = {"jobs": 1, "states": 3, "cluster": 1, "clients": 2, "shadow": 2, "upstream": 10}


class Series:
    """The last values of some numbers, a point a turn."""

    def __init__(self, points: int = POINTS) -> None:
        self._points = points
        self._by_name: dict[str, deque[float | None]] = {}
        self._turns = 0

    def add(self, values: dict[str, float | None]) -> None:
        """Add a point to each series; one without a value gets a gap."""
        self._turns += 1
        for name in values.keys() | self._by_name.keys():
            series = self._by_name.setdefault(name, deque([None] * min(self._turns - 1, self._points), self._points))
            series.append(values.get(name))
            if not any(each is not None for each in series):
                del self._by_name[name]

    def of(self, name: str) -> list[float | None]:
        """Return a series, the oldest point first."""
        return list(self._by_name.get(name, ()))


@dataclass
class Cluster:
    """The servers of a cluster: their facts by address, or the error in their place."""

    nodes: list[facts.Node] = field(default_factory=list)
    info: dict[str, dict[str, str]] = field(default_factory=dict)
    jobs: dict[str, list[facts.Job]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    through: str = ""  # the server behind a proxy that listed them; empty if the endpoint is a server itself


@dataclass
class EndpointState:
    """The facts of the endpoint.

    Args:
        errors: The refused groups, with the server's error.
    """

    at_s: float = 0.0
    info: dict[str, str] = field(default_factory=dict)
    jobs: list[facts.Job] = field(default_factory=list)
    states: dict[str, list[facts.State]] = field(default_factory=dict)
    cluster: Cluster = field(default_factory=Cluster)
    slow: list[facts.SlowRequest] = field(default_factory=list)
    events: list[facts.LatencyEvent] = field(default_factory=list)
    commands: list[facts.Command] = field(default_factory=list)
    clients: list[dict[str, str]] = field(default_factory=list)
    users: list[facts.User] = field(default_factory=list)
    has_upstream: bool = False
    shadow: list[dict[str, Any]] = field(default_factory=list)
    owners: list[dict[str, Any]] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)


class Hub:
    """All that the tabs of one user share: the client, the facts, the graphs, and the reads of this turn."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.client = Client(endpoint)
        self.facts = EndpointState()
        self.series = Series()
        self.watcher = Watcher(self.client)
        self.moves: deque[tuple[float, int, int, str, str]] = deque(maxlen=MOVES_MAX)
        self.error: RequestError | None = None
        self.lost_since_s = 0.0
        self.turn = 0
        self._wanted: dict[str, float] = {}
        self._polled_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._turned = asyncio.Condition()
        self._listing: facts.Listing | None = None  # the last reply of CLIENT LIST
        self._has_new_group = asyncio.Event()  # a page wants facts that the loop does not read yet
        self._read: dict[Hashable, asyncio.Future[Any]] = {}

    async def poll(self, groups: Iterable[str] = ()) -> None:
        """Keep the loop running, with these groups of facts. Waits for the first facts of a new group."""
        self._polled_s = time.monotonic()
        is_new = False
        for group in ("jobs", "upstream", *groups):
            is_new |= self._polled_s - self._wanted.get(group, -WANTED_S) >= WANTED_S
            self._wanted[group] = self._polled_s
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        if is_new:
            self._has_new_group.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_WAIT_S_MAX):
                    await self.wait_for_turn(self.turn + 1)
        if isinstance(self.error, SignInError):
            raise self.error

    async def wait_for_turn(self, turn: int) -> None:
        """Wait until the loop has done a turn."""
        async with self._turned:
            await self._turned.wait_for(lambda: self.turn >= turn)

    async def once(self, name: Hashable, read: Callable[[], Awaitable[Found]]) -> Found:
        """Return the result of `read`, which is called once in a turn for all tabs that pass the same name."""
        found = self._read.get(name)
        if found is None:
            found = self._read[name] = asyncio.ensure_future(read())
        return await asyncio.shield(found)

    async def close(self) -> None:
        """End the loop and close all connections."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self.watcher.close()
        await self.client.close()

    async def _run(self) -> None:
        last_turns: dict[str, int] = {}
        self.facts, self.series = EndpointState(), Series()  # graphs do not show the time without a tab
        while time.monotonic() - self._polled_s < REST_AFTER_S:
            started_s = time.monotonic()
            due = [
                group
                for group, turns in TURNS.items()
                if started_s - self._wanted.get(group, -WANTED_S) < WANTED_S
                and self.turn - last_turns.get(group, -turns) >= turns
            ]
            await self._poll(due)
            last_turns |= dict.fromkeys(due, self.turn)
            self._read.clear()
            async with self._turned:
                self.turn += 1
                self._turned.notify_all()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, TURN_S - (time.monotonic() - started_s))):
                    await self._has_new_group.wait()
            self._has_new_group.clear()
        await self.watcher.close()
        await self.client.close()  # the next request connects again

    async def _poll(self, groups: Sequence[str]) -> None:
        readers = {
            "jobs": self._read_jobs,
            "states": self._read_states,
            "cluster": self._read_cluster,
            "clients": self._read_clients,
            "shadow": self._read_shadow,
            "upstream": self._read_upstream,
        }
        for group in groups:
            try:
                await readers[group]()
                self.facts.errors.pop(group, None)
            except RefusedError as error:
                self.facts.errors[group] = str(error)
            except (RequestError, TimeoutError) as error:
                if self.error is None:
                    self.lost_since_s = time.time()
                self.error = error if isinstance(error, RequestError) else LostError(f"{self.endpoint.url} is too slow")
                self.series.add({})
                return
        self.error = None

    async def _read_jobs(self) -> None:
        before = self.facts.info
        info, jobs = await self.client.execute_all(("INFO",), ("STATE", "JOBS"))
        since_s, self.facts.at_s = self.facts.at_s, time.time()
        self.facts.info = {} if isinstance(info, RefusedError) else facts.info_of(info)
        if isinstance(jobs, RefusedError):
            raise jobs
        self.facts.jobs = facts.jobs_of(jobs)
        self.series.add(self._points(before, self.facts.at_s - since_s))

    def _points(self, before: dict[str, str], seconds: float) -> dict[str, float | None]:
        """Return this turn's point of each graph."""
        now, jobs = self.facts.info, self.facts.jobs

        def rate(*names: str) -> float | None:
            pairs = [(facts.integer(before.get(name)), facts.integer(now.get(name))) for name in names]
            if seconds <= 0 or any(old is None or new is None or new < old for old, new in pairs):
                return None  # the first turn, or another server
            return sum((new or 0) - (old or 0) for old, new in pairs) / seconds

        ages = [job.age_ms for job in jobs if job.age_ms is not None and job.condition != "stale"]
        points: dict[str, float | None] = {
            "reads": rate("keyspace_hits", "keyspace_misses"),
            "requests": rate("total_commands_processed"),
            "out": rate("total_net_output_bytes"),
            "clients": facts.integer(now.get("connected_clients")),
            "keys": sum(job.keys for job in jobs),
            "epochs": sum(job.epochs_per_minute or 0 for job in jobs if job.condition != "stale"),
            "changes": sum(job.changes_per_minute or 0 for job in jobs if job.condition != "stale"),
            "age": max(ages, default=None),
        }
        for job in jobs:
            points[f"age of {job.name}"] = job.age_ms
            points[f"epochs of {job.name}"] = job.epochs_per_minute
        return points

    async def _read_states(self) -> None:
        names = [job.name for job in self.facts.jobs][:JOBS_LISTED_MAX]
        replies = await self.client.execute_all(*(("STATE", "LIST", name) for name in names))
        self.facts.states = {
            name: [] if isinstance(reply, RefusedError) else facts.states_of(reply)
            for name, reply in zip(names, replies, strict=True)
        }

    async def _read_cluster(self) -> None:
        before, through = self.facts.cluster.nodes, ""
        (topology,) = await self.client.execute_all(("STATE", "TOPOLOGY"))
        client = self.client
        if isinstance(topology, RefusedError):
            client, through = await self._server_of_proxy(topology)
            topology = await client.execute("STATE", "TOPOLOGY")
        cluster = Cluster(nodes=facts.nodes_of(topology), through=through)
        await asyncio.gather(*(self._read_node(cluster, node) for node in cluster.nodes))
        if before:
            self.moves.extendleft((time.time(), *move) for move in facts.moves_of(before, cluster.nodes))
        self.facts.cluster = cluster

    async def _server_of_proxy(self, refusal: RefusedError) -> tuple[Client, str]:
        """Return the client and the address of a server behind a proxy; raise the refusal if there is none.

        The proxy names the server in its reply to STATE LOCATE.
        """
        where = facts.text_of(facts.fields_of(await self.client.execute("STATE", "LOCATE", "sparkis-ui")).get("where"))
        host, _, port = where.rpartition(":")
        if not host or not port.isdigit():
            raise refusal
        return self.client.at(host.strip("[]"), int(port)), where

    async def _read_node(self, cluster: Cluster, node: facts.Node) -> None:
        try:
            client = self.client.at(node.host, node.port)
            info, jobs = await client.execute_all(("INFO",), ("STATE", "JOBS"))
            cluster.info[node.address] = {} if isinstance(info, RefusedError) else facts.info_of(info)
            cluster.jobs[node.address] = [] if isinstance(jobs, RefusedError) else facts.jobs_of(jobs)
        except (RequestError, TimeoutError) as error:
            cluster.errors[node.address] = str(error) or "no reply in time"

    async def _read_clients(self) -> None:
        known = facts.integer(self.facts.info.get("connected_clients")) or 0
        requests: list[tuple[str | bytes | int, ...]] = [
            ("SLOWLOG", "GET", SLOWLOG_MAX),
            ("LATENCY", "LATEST"),
            ("INFO", "commandstats"),
        ]
        if known <= CLIENTS_LISTED_MAX:
            requests.append(("CLIENT", "LIST"))
        slow, events, commands, *clients = await self.client.execute_all(*requests)
        self.facts.slow = [] if isinstance(slow, RefusedError) else facts.slow_requests_of(slow)
        self.facts.events = [] if isinstance(events, RefusedError) else facts.events_of(events)
        self.facts.commands = [] if isinstance(commands, RefusedError) else facts.commands_of(facts.info_of(commands))
        listed = clients and not isinstance(clients[0], RefusedError)
        self.facts.clients = facts.clients_of(clients[0]) if listed else []
        before, self._listing = self._listing, facts.Listing(self.facts.clients, time.monotonic()) if listed else None
        if before is not None and time.monotonic() - before.at_s > WANTED_S:
            before = None  # nobody has looked since
        self.facts.users = [] if self._listing is None else facts.users_of(self._listing, before)
        refused = [str(each) for each in (slow, events, commands, *clients) if isinstance(each, RefusedError)]
        if refused:
            raise RefusedError(refused[0])

    async def _read_shadow(self) -> None:
        shadow, owners = await self.client.execute_all(("STATE", "SHADOW"), ("STATE", "OWNERS"))
        self.facts.owners = [] if isinstance(owners, RefusedError) else facts.rows_of(owners)
        if isinstance(shadow, RefusedError):
            self.facts.shadow = []
            raise shadow
        self.facts.shadow = facts.rows_of(shadow)

    async def _read_upstream(self) -> None:
        (owners,) = await self.client.execute_all(("STATE", "OWNERS"))
        self.facts.has_upstream = not isinstance(owners, RefusedError)
