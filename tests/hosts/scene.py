"""A world whose readers judge each reply, in which faults happen one after another, and the table of what was read."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos.judge import Window
from benchmarks.chaos.readers import PAUSE_S, Readers
from benchmarks.results import machine, write_section
from compat.waiting import READ_PAUSE_S, eventually
from tests.hosts.faults import DISK_BYTES, FULL, Fault
from tests.hosts.upstream_clients import PROXIES, UpstreamClient
from tests.hosts.world import PROXY_PORT, World, wait_for_epochs

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
HEADLINE = "| fault | reads | wrong answers | failed reads | longest without an answer for a key |\n"
RULE = "|---|---:|---:|---:|---:|\n"


@dataclass(frozen=True)
class Extent:
    """How much of a scene there is.

    Args:
        epochs, reads: A fault lasts until so many epochs were committed and so many replies were judged.
        pause_s, upstream_pause_s: How long a reader's connection, and the client of the upstream, pause after a reply.
    """

    epochs: int
    reads: int
    pause_s: float
    upstream_pause_s: float


# CI has two processors, for this and for other tests beside it.
SELECTION = Extent(epochs=8, reads=1_000, pause_s=0.02, upstream_pause_s=0.02)
WHOLE = Extent(epochs=12, reads=5_000, pause_s=PAUSE_S, upstream_pause_s=READ_PAUSE_S)
# A Spark job needs the processors, too.
WITH_SPARK = Extent(epochs=12, reads=5_000, pause_s=0.02, upstream_pause_s=0.02)


@dataclass
class Row:
    """What was read during a fault, in all rounds."""

    rounds: int = 0
    reads: int = 0
    failed: int = 0
    longest_s: float = 0.0
    wrong: Counter[str] = field(default_factory=Counter)

    def add(self, window: Window) -> None:
        """Add a round."""
        self.rounds += 1
        self.reads += window.reads
        self.failed += window.failed
        self.wrong += window.wrong
        self.longest_s = max(self.longest_s, window.longest_s)

    def text(self, name: str) -> str:
        """Return the row of the table."""
        wrong = ", ".join(f"**{count} {what}**" for what, count in self.wrong.items()) or "0"
        return f"| {name} | {self.reads:,} | {wrong} | {self.failed:,} | {self.longest_s:.2f} s |\n"


class Scene:
    """A world with its readers, and the results of its faults."""

    def __init__(self, world: World, extent: Extent) -> None:
        self.world, self.extent = world, extent
        self.rows: dict[str, Row] = {}
        self._start(world)
        addresses = [(world.network.hosts[name].address, PROXY_PORT) for name in PROXIES]
        self.readers = Readers(addresses, self.world.client.network, pause_s=extent.pause_s)
        self.upstream = UpstreamClient(self.world, extent.upstream_pause_s)
        self.recover()

    def _start(self, world: World) -> None:
        world.start_registry()
        world.start_any_writer()
        world.start_registry("standby", "--standby")
        for number in range(world.servers):
            world.start_server(number, disk=DISK_BYTES if number == FULL else 0)
        world.start_upstream()
        world.wait_until_complete()
        for number in range(len(PROXIES)):
            world.start_proxy(number, *world.upstream_options(number))

    def run(self, fault: Fault) -> Window:
        """Have a fault happen, and end; return what was read until all keys were read at a later epoch."""
        self.readers.begin()
        if fault.may_step_back:
            self.readers.allow_step_back()
        end = fault.begin(self.world)
        if not fault.stops_writer:
            wait_for_epochs(self.world, self.extent.epochs)
        reads = self.readers.reads + self.extent.reads
        eventually(lambda: self.readers.reads >= reads, awaited=self.output)
        end()
        self.recover()
        window = self.readers.begin()
        self.rows.setdefault(fault.name, Row()).add(window)
        return window

    def recover(self) -> None:
        """Wait until all servers are up, and all keys were read at an epoch that is committed later."""
        self.world.wait_until_complete()
        after = self.world.record.committed() + 1

        def is_well() -> bool:
            newest = self.readers.newest
            assert newest <= self.world.record.committed(), "an epoch is read that is not committed"
            return self.readers.is_at(after)

        eventually(is_well, awaited=self.output, interval_s=self.world.poll_s)
        reads = self.upstream.reads
        eventually(lambda: self.upstream.reads > reads, awaited=self.output)

    def output(self) -> str:
        """Return what the programs and the readers say."""
        errors = self.readers.begin().errors.most_common(5)
        return f"{self.world.output()}\n{errors}\n{self.upstream.errors.most_common(5)}"

    def stop(self) -> None:
        """Stop the readers."""
        self.readers.stop()
        self.upstream.stop()

    def write_page(self) -> None:
        """Write the table into its section of docs/reliability.md."""
        has_spark, has_store = self.world.has_spark, self.world.has_store
        section = "hosts with a Spark job" if has_spark else "hosts with an object store" if has_store else "hosts"
        when = time.strftime("%Y-%m-%d", time.gmtime())
        rows = "".join(row.text(name) for name, row in self.rows.items())
        rounds = {row.rounds for row in self.rows.values()}
        of_rounds = "" if rounds == {1} else f"{rounds.pop()} rounds. "
        writer = "a Spark job" if has_spark else "a writer without Spark"
        upstream = f"{self.upstream.reads:,}, of which {len(self.upstream.wrongs)} wrong"
        summary = (
            f"\n{of_rounds}{self.world.servers} state servers, {writer}. Reads of a key of the upstream: {upstream}. "
            f"{when}, {machine()}.\n"
        )
        write_section(PAGE, section, f"{HEADLINE}{RULE}{rows}{summary}")
