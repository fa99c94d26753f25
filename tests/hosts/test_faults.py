"""Faults between hosts, one after another, while readers check each reply: none is older, torn, foreign or missing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.chaos.judge import Window
from benchmarks.chaos.readers import Readers
from benchmarks.results import machine, write_section
from compat.waiting import eventually
from tests.hosts.faults import DISK_BYTES, FAULTS, FULL, Fault
from tests.hosts.network import Network
from tests.hosts.upstream_clients import PROXIES, UpstreamClient
from tests.hosts.world import PROXY_PORT, World, wait_for_epochs

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
# A fault lasts until so many epochs were committed and so many replies were judged.
EPOCHS, READS = 8, 2_000
WHOLE_EPOCHS, WHOLE_READS = 12, 5_000
HEADLINE = "| fault | reads | wrong answers | failed reads | longest without an answer for a key |\n"
RULE = "|---|---:|---:|---:|---:|\n"


class Scene:
    """A world with its readers, and the results of its faults."""

    def __init__(self, folder: Path, network: Network, *, is_whole: bool, has_spark: bool) -> None:
        self.is_whole, self.has_spark = is_whole, has_spark
        self.world = World(folder, network, servers=6 if has_spark else 4, replicas=1, has_spark=has_spark)
        self.rows: list[str] = []
        self._start(self.world)
        addresses = [(network.hosts[name].address, PROXY_PORT) for name in PROXIES]
        self.readers = Readers(addresses, self.world.client.network)
        self.upstream = UpstreamClient(self.world)
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
            wait_for_epochs(self.world, WHOLE_EPOCHS if self.is_whole else EPOCHS)
        reads = self.readers.reads + (WHOLE_READS if self.is_whole else READS)
        eventually(lambda: self.readers.reads >= reads, awaited=self.said)
        end()
        self.recover()
        window = self.readers.begin()
        wrong = f"**{window.wrong_replies()}**" if window.wrong else "0"
        numbers = f"{window.reads:,} | {wrong} | {window.failed:,} | {window.longest_s:.2f} s"
        self.rows.append(f"| {fault.name} | {numbers} |\n")
        return window

    def recover(self) -> None:
        """Wait until all servers are up, and all keys were read at an epoch that is committed later."""
        self.world.wait_until_complete()
        after = self.world.record.committed() + 1

        def is_well() -> bool:
            newest = self.readers.newest
            assert newest <= self.world.record.committed(), "an epoch is read that is not committed"
            return self.readers.is_at(after)

        eventually(is_well, awaited=self.said)
        reads = self.upstream.reads
        eventually(lambda: self.upstream.reads > reads, awaited=self.said)

    def said(self) -> str:
        """Return what the programs and the readers say."""
        errors = self.readers.begin().errors.most_common(5)
        return f"{self.world.said()}\n{errors}\n{self.upstream.errors.most_common(5)}"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Scene]:
    with Network(tmp_path_factory.mktemp("network")) as network:
        is_whole = request.config.getoption("--whole")
        has_spark = is_whole and not request.config.getoption("--without-spark")
        made = Scene(tmp_path_factory.mktemp("world"), network, is_whole=is_whole, has_spark=has_spark)
        yield made
        made.readers.stop()
        made.upstream.stop()
        if made.is_whole and len(made.rows) == len(FAULTS):
            write_page(made)


def write_page(scene: Scene) -> None:
    """Write the table into docs/reliability.md."""
    when = time.strftime("%Y-%m-%d", time.gmtime())
    of_upstream = (
        f"Reads of a key of the upstream: {scene.upstream.reads:,}, of which {len(scene.upstream.wrongs)} wrong."
    )
    of_world = f"{scene.world.servers} state servers, {'a Spark job' if scene.has_spark else 'a writer without Spark'}."
    summary = f"\n{of_world} {of_upstream} {when}, {machine()}.\n"
    write_section(PAGE, "hosts", f"{HEADLINE}{RULE}{''.join(scene.rows)}{summary}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Choose the faults."""
    is_whole = metafunc.config.getoption("--whole", False)
    faults = [fault for fault in FAULTS if fault.is_selected or is_whole]
    metafunc.parametrize("fault", faults, ids=[fault.name for fault in faults])


def test_no_reply_is_wrong_while_a_fault_lasts_and_all_keys_are_current_after_it(scene: Scene, fault: Fault) -> None:
    window = scene.run(fault)
    assert not window.wrong, (window.wrong, scene.said())
    assert not scene.upstream.wrongs, scene.upstream.wrongs[:3]
    assert window.reads
