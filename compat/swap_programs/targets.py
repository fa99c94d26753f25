"""The two addresses that each program runs at: a redis-server alone, and a proxy with another as its upstream.

Behind the proxy a job publishes states all the time, and a reader reads them through the proxy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

from compat.conformance.servers import Running, free_port, redis_server, sparkis_proxy, sparkis_server, wait_for_keys
from compat.waiting import eventually
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

ALONE, SWAPPED = "redis-server alone", "through the proxy"

STATE = StateDescriptor("speed", key="car", value="kmh")
KEYS = [b"job:speed:%d" % number for number in range(100)]
EPOCH_INTERVAL_S = 0.2
READ_INTERVAL_S = 0.02


@dataclass
class Target:
    """An address for a program, and the redis-server that has the program's keys."""

    name: str
    port: int
    redis: Running

    @property
    def url(self) -> str:
        """The address as clients write it."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def version(self) -> str:
        """The version of the redis-server."""
        with self.redis.connect() as connection:
            information: bytes = connection.call("INFO", "server").plain
        found = re.search(rb"redis_version:(\S+)", information)
        assert found is not None, information
        return found[1].decode()

    def empty(self) -> None:
        """Remove all that a program has left."""
        with self.redis.connect() as connection:
            for words in (("FLUSHALL",), ("SCRIPT", "FLUSH"), ("FUNCTION", "FLUSH"), ("CONFIG", "RESETSTAT")):
                connection.call(*words)


@dataclass
class StateReads:
    """Reads of a running job's state through the proxy: all keys at once, whose values are their epoch's number."""

    count: int = 0
    wrong: list[str] = field(default_factory=list)

    def read(self, proxy: Running, is_over: Event) -> None:
        """Read until it is over. A wrong read: an error, values of several epochs, or an earlier epoch than before.

        A program's CLIENT KILL may be about this reader, which then connects again.
        """
        last = 0
        while not is_over.is_set():
            with proxy.connect() as client, suppress(EOFError, ConnectionError):
                while not is_over.wait(READ_INTERVAL_S):
                    reply = client.call("MGET", *KEYS)
                    epochs = {0} if reply.is_error else {int(value or 0) for value in reply.plain}
                    if len(epochs) > 1 or min(epochs) < max(last, 1):
                        self.wrong.append(repr(reply.plain))
                    self.count, last = self.count + 1, max(epochs)


@dataclass
class Targets:
    """Both addresses, and the reads of states beside the programs."""

    alone: Target
    swapped: Target
    reads: StateReads


@contextmanager
def running_targets() -> Iterator[Targets]:
    """Run all servers, the job and its reader."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="swap-programs-")))
        redises = []
        for name in ("alone", "upstream"):
            (folder / name).mkdir()
            redises.append(stack.enter_context(redis_server(folder / name)))
        log = folder / "log"
        log.mkdir()
        is_over = Event()
        stack.enter_context(_running(Thread(target=publish, args=(log, is_over)), is_over))
        eventually(lambda: list(log.rglob("epochs/*.json")), awaited="the job's first epoch")
        proxy = stack.enter_context(_proxy(folder, log, redises[1]))
        reads = StateReads()
        stack.enter_context(_running(Thread(target=reads.read, args=(proxy, is_over)), is_over))
        yield Targets(Target(ALONE, redises[0].port, redises[0]), Target(SWAPPED, proxy.port, redises[1]), reads)


def publish(log: Path, is_over: Event) -> None:
    """Publish an epoch five times a second: each sets every key to the epoch's number."""
    with LogWriter(log, "job", [STATE], "first") as writer:
        number = 1
        while not is_over.wait(EPOCH_INTERVAL_S):
            writer.publish([Change(STATE.name, Op.PUT, key, value=b"%d" % number) for key in KEYS])
            number += 1


@contextmanager
def _proxy(folder: Path, log: Path, upstream: Running) -> Iterator[Running]:
    port, topology = free_port(), folder / "topology.json"
    node = {"host": "127.0.0.1", "port": port, "slots": "0-16383"}
    topology.write_text(json.dumps({"version": 1, "nodes": [node]}))
    place = ("--cluster", str(topology), "--cluster-node", f"127.0.0.1:{port}")
    given = ("--upstream", f"redis://127.0.0.1:{upstream.port}", "--ownership", str(folder / "owners.json"))
    with sparkis_server(folder / "store", log, *place, port=port), sparkis_proxy(topology, *given) as proxy:
        with proxy.connect() as client:
            eventually(lambda: not client.call("GET", "nobody's").is_error, awaited="the upstream's keys")
            eventually(lambda: client.call("GET", KEYS[0]).plain, awaited="the states' keys")
        wait_for_keys(proxy, len(KEYS))
        yield proxy


@contextmanager
def _running(thread: Thread, is_over: Event) -> Iterator[None]:
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
