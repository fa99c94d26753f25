"""One polling loop for each user of the endpoint, however many tabs look on.

A loop asks for the facts that some page has wanted lately, once a second, and rests when nobody has looked for a
minute. What one tab has read in a turn, all others of that turn get, too (`once`).
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
from sparkis_ui.client import AskError, Client, Endpoint, LostError, RefusedError, SignInError
from sparkis_ui.watching import Watcher

Found = TypeVar("Found")

TURN_S = 1.0
REST_AFTER_S = 60.0  # without a viewer
WANTED_S = 10.0  # facts that no page has asked for since are not polled
POINTS = 300  # five minutes of graphs
POINTS_MIN = 60  # the width of a graph that has fewer
MOVES_MAX = 50
FIRST_WAIT_S_MAX = 4.0
SLOWLOG_MAX = 64
CLIENTS_LISTED_MAX = 1000  # with more, CLIENT LIST would be long: its page says so
JOBS_LISTED_MAX = 200  # of so many jobs at most the states are listed
# The groups of facts, and every how many turns they are asked for.
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
    through: str = ""  # the proxy's server that named them; empty if the endpoint is one of them


@dataclass
class Facts:
    """What is known of the endpoint. errors: the groups that the server refused, and why."""

    at_s: float = 0.0
    info: dict[str, str] = field(default_factory=dict)
    jobs: list[facts.Job] = field(default_factory=list)
    states: dict[str, list[facts.State]] = field(default_factory=dict)
    cluster: Cluster = field(default_factory=Cluster)
    slow: list[facts.SlowRequest] = field(default_factory=list)
    events: list[facts.Event] = field(default_factory=list)
    commands: list[facts.Command] = field(default_factory=list)
    clients: list[dict[str, str]] = field(default_factory=list)
    has_upstream: bool = False
    shadow: list[dict[str, Any]] = field(default_factory=list)
    owners: list[dict[str, Any]] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)


class Hub:
    """Everything that the tabs of one user share: the client, the facts, the graphs, what was read in this turn."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.client = Client(endpoint)
        self.facts = Facts()
        self.series = Series()
        self.watcher = Watcher(self.client)
        self.moves: deque[tuple[float, int, int, str, str]] = deque(maxlen=MOVES_MAX)
        self.error: AskError | None = None
        self.lost_since_s = 0.0
        self.turn = 0
        self._wanted: dict[str, float] = {}
        self._viewed_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._turned = asyncio.Condition()
        self._wished = asyncio.Event()  # a page wants facts that were not polled
        self._read: dict[Hashable, asyncio.Future[Any]] = {}

    async def view(self, groups: Iterable[str] = ()) -> None:
        """Take part in the loop: it goes on, and asks for these groups. Waits for the first facts."""
        self._viewed_s = time.monotonic()
        is_new = False
        for group in ("jobs", "upstream", *groups):
            is_new |= self._viewed_s - self._wanted.get(group, -WANTED_S) >= WANTED_S
            self._wanted[group] = self._viewed_s
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        if is_new:
            self._wished.set()
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
        """Return what `read` returns, read once in a turn for all tabs that ask by the same name."""
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
        asked: dict[str, int] = {}
        self.facts, self.series = Facts(), Series()  # after a rest, graphs begin anew
        while time.monotonic() - self._viewed_s < REST_AFTER_S:
            started_s = time.monotonic()
            due = [
                group
                for group, turns in TURNS.items()
                if started_s - self._wanted.get(group, -WANTED_S) < WANTED_S
                and self.turn - asked.get(group, -turns) >= turns
            ]
            await self._ask_for(due)
            asked |= dict.fromkeys(due, self.turn)
            self._read.clear()
            async with self._turned:
                self.turn += 1
                self._turned.notify_all()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, TURN_S - (time.monotonic() - started_s))):
                    await self._wished.wait()
            self._wished.clear()
        await self.watcher.close()
        await self.client.close()  # the next request connects again

    async def _ask_for(self, groups: Sequence[str]) -> None:
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
            except (AskError, TimeoutError) as error:
                if self.error is None:
                    self.lost_since_s = time.time()
                self.error = error if isinstance(error, AskError) else LostError(f"{self.endpoint.url} is too slow")
                self.series.add({})
                return
        self.error = None

    async def _read_jobs(self) -> None:
        before = self.facts.info
        info, jobs = await self.client.ask_all(("INFO",), ("STATE", "JOBS"))
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
            pairs = [(facts.whole(before.get(name)), facts.whole(now.get(name))) for name in names]
            if seconds <= 0 or any(old is None or new is None or new < old for old, new in pairs):
                return None  # the first turn, or another server
            return sum((new or 0) - (old or 0) for old, new in pairs) / seconds

        ages = [job.age_ms for job in jobs if job.age_ms is not None and job.condition != "stale"]
        points: dict[str, float | None] = {
            "reads": rate("keyspace_hits", "keyspace_misses"),
            "requests": rate("total_commands_processed"),
            "out": rate("total_net_output_bytes"),
            "clients": facts.whole(now.get("connected_clients")),
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
        replies = await self.client.ask_all(*(("STATE", "LIST", name) for name in names))
        self.facts.states = {
            name: [] if isinstance(reply, RefusedError) else facts.states_of(reply)
            for name, reply in zip(names, replies, strict=True)
        }

    async def _read_cluster(self) -> None:
        before, through = self.facts.cluster.nodes, ""
        (topology,) = await self.client.ask_all(("STATE", "TOPOLOGY"))
        client = self.client
        if isinstance(topology, RefusedError):
            client, through = await self._server_of_proxy(topology)
            topology = await client.ask("STATE", "TOPOLOGY")
        cluster = Cluster(nodes=facts.nodes_of(topology), through=through)
        await asyncio.gather(*(self._read_node(cluster, node) for node in cluster.nodes))
        if before:
            self.moves.extendleft((time.time(), *move) for move in facts.moves_of(before, cluster.nodes))
        self.facts.cluster = cluster

    async def _server_of_proxy(self, refusal: RefusedError) -> tuple[Client, str]:
        """Return the client of a server behind a proxy, which says where a key is; raise the error if there is none."""
        where = facts.text_of(facts.fields_of(await self.client.ask("STATE", "LOCATE", "sparkis-ui")).get("where"))
        host, _, port = where.rpartition(":")
        if not host or not port.isdigit():
            raise refusal
        return self.client.at(host.strip("[]"), int(port)), where

    async def _read_node(self, cluster: Cluster, node: facts.Node) -> None:
        try:
            client = self.client.at(node.host, node.port)
            info, jobs = await client.ask_all(("INFO",), ("STATE", "JOBS"))
            cluster.info[node.address] = {} if isinstance(info, RefusedError) else facts.info_of(info)
            cluster.jobs[node.address] = [] if isinstance(jobs, RefusedError) else facts.jobs_of(jobs)
        except (AskError, TimeoutError) as error:
            cluster.errors[node.address] = str(error) or "no reply in time"

    async def _read_clients(self) -> None:
        known = facts.whole(self.facts.info.get("connected_clients")) or 0
        requests: list[tuple[str | bytes | int, ...]] = [
            ("SLOWLOG", "GET", SLOWLOG_MAX),
            ("LATENCY", "LATEST"),
            ("INFO", "commandstats"),
        ]
        if known <= CLIENTS_LISTED_MAX:
            requests.append(("CLIENT", "LIST"))
        slow, events, commands, *clients = await self.client.ask_all(*requests)
        self.facts.slow = [] if isinstance(slow, RefusedError) else facts.slow_requests_of(slow)
        self.facts.events = [] if isinstance(events, RefusedError) else facts.events_of(events)
        self.facts.commands = [] if isinstance(commands, RefusedError) else facts.commands_of(facts.info_of(commands))
        listed = clients and not isinstance(clients[0], RefusedError)
        self.facts.clients = facts.clients_of(clients[0]) if listed else []
        refused = [str(each) for each in (slow, events, commands, *clients) if isinstance(each, RefusedError)]
        if refused:
            raise RefusedError(refused[0])

    async def _read_shadow(self) -> None:
        shadow, owners = await self.client.ask_all(("STATE", "SHADOW"), ("STATE", "OWNERS"))
        self.facts.owners = [] if isinstance(owners, RefusedError) else facts.rows_of(owners)
        if isinstance(shadow, RefusedError):
            self.facts.shadow = []
            raise shadow
        self.facts.shadow = facts.rows_of(shadow)

    async def _read_upstream(self) -> None:
        (owners,) = await self.client.ask_all(("STATE", "OWNERS"))
        self.facts.has_upstream = not isinstance(owners, RefusedError)
