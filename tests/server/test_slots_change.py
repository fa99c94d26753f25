"""Two servers that hold some slots each and pass them to and fro, while epochs come and clients read.

Each epoch writes its number to every key, so that an answer tells which epoch it is of: one that is missing, or older
than an answer before it on the same connection, is wrong.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from random import Random

import pytest
from redis.cluster import RedisCluster

from compat.conformance.wire import Connection, Reply, requests
from compat.waiting import READ_PAUSE_S, WAIT_S_MAX
from resp_server.backends.stores.stores_backend import pipeline_of_stores
from resp_server.cluster.topology import Topology
from resp_server.serving.appliers import Appliers
from resp_server.serving.job_catalog import JobCatalog, LocalJobCatalog
from resp_server.serving.server import Server
from resp_server.settings.server import ServerConfig
from resp_server.workers.master import Workers
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from state_backend.model.slot_set import ALL, SlotSet
from state_backend.model.slots import slot_of
from state_backend.store.keyspace import Keyspace

READERS = 3
EPOCH_EVERY_S = 0.05
STATE = StateDescriptor("s", key="k", value="v").for_job("job")
KEYS = [b"job:s:%d" % number for number in range(400)]
LOW, HIGH, MIDDLE = SlotSet.parse("0-8191"), SlotSet.parse("8192-16383"), SlotSet.parse("4096-12287")


def count_in(slots: SlotSet) -> int:
    return sum(slot_of(key) in slots for key in KEYS)


class Node:
    """A server, in this process or in workers of its own, and followers of some slots."""

    def __init__(self, log: Path, folder: Path, workers: int, slots: SlotSet, port: int = 0) -> None:
        self._log, self._folder, self._workers = log, folder, workers
        config = ServerConfig(port=port, hosts=("127.0.0.1",))
        readers: JobCatalog
        self.server: Server | Workers
        if workers > 1:
            readers = self.server = Workers(config, workers)
        else:
            keyspace = Keyspace()
            readers, self.server = LocalJobCatalog(keyspace), Server(keyspace, config, pipeline_of_stores)
        self.appliers = Appliers(readers, [str(log)], folder, slots=slots)
        self.appliers.on_change = self._changed
        self.wanted = slots
        self.counts = {count_in(slots)}
        self._change = asyncio.Event()

    def _changed(self) -> None:
        self._change.set()

    async def start(self) -> None:
        if isinstance(self.server, Workers):
            await self.server.start_processes()
        await self.appliers.start()
        await self.appliers.catch_up()
        self.server.set_loading(False)
        await self.server.start()

    async def stop(self) -> None:
        await self.server.stop()
        await self.appliers.stop()

    async def started_again(self, slots: SlotSet) -> Node:
        """Stop, and return another one in its place, which goes on from its stores."""
        await self.stop()
        return Node(self._log, self._folder, self._workers, slots, self.server.port)

    def want(self, slots: SlotSet) -> None:
        self.wanted = slots
        self.appliers.set_desired_slots(slots)

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._change.clear()
            await asyncio.wait_for(self._change.wait(), WAIT_S_MAX)


class Pair:
    """Two nodes, and what a registry does."""

    def __init__(self, nodes: list[Node], writer: LogWriter) -> None:
        self.nodes = nodes
        self._writer = writer
        self._version = self._epoch = 0
        self._publishing: asyncio.Task[None] | None = None
        self.owned = [node.wanted for node in nodes]

    def topology(self) -> Topology:
        rows = [
            {"host": "127.0.0.1", "port": node.server.port, "slots": str(slots)}
            for node, slots in zip(self.nodes, self.owned, strict=True)
        ]
        self._version += 1
        return Topology.of_json({"version": self._version, "nodes": rows})

    async def show(self, *order: int) -> None:
        """Have a new topology shown by one node after another."""
        topology = self.topology()
        for number in order:
            self.nodes[number].counts.add(count_in(self.owned[number]))
            self.nodes[number].server.set_topology(topology, topology.nodes[number].id)
            await self.nodes[number].server.settled()

    async def move(self, slots: SlotSet, giver: int, taker: int) -> None:
        """Move slots as a registry does."""
        taking, giving = self.nodes[taker], self.nodes[giver]
        taking.want(taking.wanted | slots)
        await taking.until(lambda: not slots - taking.appliers.owned_slots)
        self.give(slots, giver, taker)
        await self.show(taker, giver)
        giving.want(giving.wanted - slots)

    def give(self, slots: SlotSet, giver: int, taker: int) -> None:
        self.owned[giver] -= slots
        self.owned[taker] |= slots

    def publish(self) -> None:
        self._publishing = asyncio.create_task(self._publish())

    async def _publish(self) -> None:
        while True:
            self._epoch += 1
            changes = [Change("s", Op.PUT, key, None, b"%d" % self._epoch) for key in KEYS]
            await asyncio.to_thread(self._writer.publish, changes)
            for node in self.nodes:
                await node.appliers.notice("job")
            await asyncio.sleep(EPOCH_EVERY_S)

    async def stop(self) -> None:
        if self._publishing is not None:
            self._publishing.cancel()
            with suppress(asyncio.CancelledError):
                await self._publishing


@asynccontextmanager
async def pair_of(folder: Path, workers: int) -> AsyncIterator[Pair]:
    """Two nodes with half of the slots each."""
    with LogWriter(folder / "log", "job", [STATE], "q") as writer:
        writer.publish([Change("s", Op.PUT, key, None, b"0") for key in KEYS])
        nodes = [Node(folder / "log", folder / f"store{n}", workers, each) for n, each in enumerate((LOW, HIGH))]
        pair = Pair(nodes, writer)
        try:
            await asyncio.gather(*(node.start() for node in nodes))
            await pair.show(0, 1)
            pair.publish()
            yield pair
        finally:
            await pair.stop()
            await asyncio.gather(*(node.stop() for node in nodes))


class Reader(threading.Thread):
    """A client of both nodes: pipelines of keys of all slots, and counts of all keys."""

    def __init__(self, nodes: Sequence[Node], seed: int) -> None:
        super().__init__(daemon=True)
        self._nodes = nodes
        self._random = Random(seed)
        self._newest = [0] * len(nodes)
        self._is_over = threading.Event()
        self.wrong: list[object] = []
        self.answers: Counter[str] = Counter()

    def run(self) -> None:
        try:
            with ExitStack() as stack:
                connections = [stack.enter_context(Connection(node.server.port)) for node in self._nodes]
                while not self._is_over.wait(READ_PAUSE_S):
                    for at, connection in enumerate(connections):
                        self._read(at, connection)
        except Exception as error:
            self.wrong.append(error)

    def end(self) -> None:
        self._is_over.set()
        self.join(WAIT_S_MAX)

    def _read(self, at: int, connection: Connection) -> None:
        keys = self._random.sample(KEYS, 10)
        sent = [*((b"GET", key) for key in keys), (b"DBSIZE",)]
        connection.send(requests(sent))
        replies = [connection.read() for _ in sent]
        for key, reply in zip(keys, replies, strict=False):
            self._check(at, key, reply)
        count = replies[-1]
        if count.value not in self._nodes[at].counts and not self._is_refused(count):
            self.wrong.append((at, "DBSIZE", count.raw))

    def _is_refused(self, reply: Reply) -> bool:
        is_refused = reply.is_error and reply.value.startswith(b"CLUSTERDOWN Hash slot not served: ")
        self.answers["refused"] += is_refused
        return is_refused

    def _check(self, at: int, key: bytes, reply: Reply) -> None:
        if reply.is_error:
            if reply.value.startswith(b"MOVED"):
                self.answers["moved"] += 1
            elif not self._is_refused(reply):
                self.wrong.append((at, key, reply.raw))
        elif reply.value is None or int(reply.value) < self._newest[at]:
            self.wrong.append((at, key, reply.raw, self._newest[at]))
        else:
            self._newest[at] = int(reply.value)
            self.answers["read"] += 1


@asynccontextmanager
async def reading(pair: Pair) -> AsyncIterator[Counter[str]]:
    """Read all the time; nothing may be wrong. What was answered is counted when the reading is over."""
    readers = [Reader(pair.nodes, seed) for seed in range(READERS)]
    answers: Counter[str] = Counter()
    for reader in readers:
        reader.start()
    try:
        yield answers
    finally:
        for reader in readers:
            await asyncio.to_thread(reader.end)
            answers.update(reader.answers)
    assert [wrong for reader in readers for wrong in reader.wrong] == []


async def all_are_read(pair: Pair) -> None:
    """Every key is answered by the node that owns its slot, with the same epoch or a later one than before."""

    def read() -> None:
        for node, slots in zip(pair.nodes, pair.owned, strict=True):
            with Connection(node.server.port) as connection:
                values = [connection.call("GET", key).value for key in KEYS if slot_of(key) in slots]
                assert all(value is not None and value.isdigit() for value in values), values

    await asyncio.to_thread(read)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_no_read_fails_while_slots_move_and_epochs_come(tmp_path: Path, workers: int) -> None:
    async def scenario() -> None:
        async with pair_of(tmp_path, workers) as pair:
            async with reading(pair) as answers:
                for _ in range(2):
                    await pair.move(MIDDLE & LOW, 0, 1)
                    await pair.move(MIDDLE, 1, 0)
                    await pair.move(MIDDLE & HIGH, 0, 1)
            await all_are_read(pair)
            assert (answers["refused"], pair.owned) == (0, [LOW, HIGH])
            assert answers["read"] and answers["moved"]

    asyncio.run(scenario())


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_slots_are_refused_until_loaded(tmp_path: Path, workers: int) -> None:
    async def scenario() -> None:
        async with pair_of(tmp_path, workers) as pair:
            low, high = pair.nodes
            async with reading(pair) as answers:
                for slots, giver, taker in ((ALL, 0, 1), (LOW, 1, 0), (MIDDLE & HIGH, 1, 0), (MIDDLE & HIGH, 0, 1)):
                    pair.give(slots & pair.owned[giver], giver, taker)
                    await pair.show(taker, giver)
                    for node, owned in zip(pair.nodes, pair.owned, strict=True):
                        node.want(owned)
                    await pair.nodes[taker].until(
                        lambda at=taker: pair.nodes[at].appliers.owned_slots == pair.owned[at]
                    )  # type: ignore[misc]
            await all_are_read(pair)
            assert (low.appliers.owned_slots, high.appliers.owned_slots) == (LOW, HIGH)
            assert answers["refused"] and answers["read"]

    asyncio.run(scenario())


def test_restarted_node_refuses_slots_that_its_store_lacks(tmp_path: Path) -> None:
    def read(node: Node) -> None:
        with Connection(node.server.port) as connection:
            for key in KEYS:
                expected = b"$" if slot_of(key) in LOW else b"-CLUSTERDOWN Hash slot not served: "
                assert connection.call("GET", key).raw.startswith(expected), key
            assert connection.call("DBSIZE").is_error

    async def scenario() -> None:
        # With workers, because a process can open a store only once.
        async with pair_of(tmp_path, workers=2) as pair:
            await pair.nodes[0].until(lambda: pair.nodes[0].appliers.visible["job"].epoch > 0)
            await pair.stop()
            first = tmp_path / "log/job/q.1/epochs/0.json"
            first.rename(tmp_path / "away")  # so that nothing can be loaded
            pair.nodes[0] = await pair.nodes[0].started_again(ALL)
            await pair.nodes[0].start()
            assert pair.nodes[0].appliers.owned_slots == LOW
            pair.give(HIGH, 1, 0)
            await pair.show(1, 0)
            await asyncio.to_thread(read, pair.nodes[0])
            (tmp_path / "away").rename(first)
            await pair.nodes[0].until(lambda: pair.nodes[0].appliers.owned_slots == ALL)
            await all_are_read(pair)

    asyncio.run(scenario())


def test_redis_py_retries_until_slots_moved_too_early_are_loaded(tmp_path: Path) -> None:
    def read(port: int, is_over: threading.Event) -> int:
        reads = 0
        with RedisCluster(host="127.0.0.1", port=port) as client:
            while not is_over.wait(READ_PAUSE_S):
                values = [client.get(key) for key in KEYS[:50]]
                assert None not in values
                reads += len(values)
        return reads

    async def scenario() -> None:
        async with pair_of(tmp_path, 1) as pair, reading(pair) as answers:
            is_over = threading.Event()
            being_read = asyncio.create_task(asyncio.to_thread(read, pair.nodes[0].server.port, is_over))
            try:
                for giver, taker in ((0, 1), (1, 0), (0, 1)):
                    pair.give(pair.owned[giver], giver, taker)
                    await pair.show(taker, giver)
                    for node, owned in zip(pair.nodes, pair.owned, strict=True):
                        node.want(owned)
                    await pair.nodes[taker].until(lambda at=taker: pair.nodes[at].appliers.owned_slots == ALL)  # type: ignore[misc]
                    await all_are_read(pair)
            finally:
                is_over.set()
                reads = await being_read
            assert reads
        assert answers["refused"]

    asyncio.run(scenario())
