"""`make chaos`: the replies that readers get while processes of a cluster die, hang, move or join.

A Spark job on executors of this machine writes the number of its micro-batch to each of its keys once a second. Its
state is served by servers beside the executors and by two that are started by hand; a registry is on standby. Readers
send requests and transactions to two proxies without a pause. Then one event after another happens, and each reply is
checked. Wrong replies are: a missing key, two epochs in one reply, an epoch older than the last one on that connection,
and an epoch that was not committed. The table goes into docs/reliability.md. The exit code is 1 if a reply was wrong or
an epoch was lost.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.events import EVENTS, Event, ensure_manual_master
from benchmarks.chaos.fleet import START_S_MAX, ChaosError, Fleet
from benchmarks.chaos.judge import Window
from benchmarks.chaos.readers import Readers
from benchmarks.chaos.relay import Relay
from benchmarks.options import Options
from benchmarks.results import machine, write_section
from benchmarks.servers import temporary_folder
from compat.processes import end_in_order
from compat.waiting import eventually
from state_backend.model.errors import SparkisError

SERVERS = 2 + 2  # beside executors, and by hand
RECOVER_S_MAX = 60.0
POLL_INTERVAL_S = 0.1
PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


@dataclass
class EventResult:
    """The result of an event. recovered_s: from its end until every key was read at an epoch committed after it."""

    event: Event
    window: Window
    recovered_s: float


class Chaos:
    """One run with a number of replicas."""

    def __init__(self, folder: Path, replicas: int, options: Options) -> None:
        self._options = options
        self._fleet = Fleet(folder, replicas)
        self._relay = Relay()
        self._readers: Readers | None = None

    def run(self, events: Sequence[Event]) -> Iterator[EventResult]:
        """Start all processes and run the events one after another; ChaosError."""
        self._begin()
        for event in events:
            yield self._run_event(event)

    def lost_epochs(self) -> int:
        """Stop the job; return how many of its epochs are missing in the log or were never read."""
        fleet, readers = self._fleet, self._readers
        assert fleet.driver is not None and readers is not None
        fleet.driver.end()
        last = fleet.record.committed()
        try:
            eventually(
                lambda: readers.is_at(last), awaited="reading the last epoch", timeout_s=RECOVER_S_MAX, error=ChaosError
            )
        except ChaosError:
            return max(1, last - readers.newest)
        return 0

    def diagnostics(self) -> str:
        """Return details for a failed run: the readers' last errors, and the processes' last output."""
        window = None if self._readers is None else self._readers.begin()
        errors = [] if window is None else [f"{count} x {reason}" for reason, count in window.errors.most_common(9)]
        reads = 0 if window is None else window.reads
        newest = -1 if self._readers is None else self._readers.newest
        committed = f"epoch {self._fleet.record.committed()} is committed, {newest} was read"
        try:
            topology = str(self._fleet.record.topology())
        except OSError:
            topology = "there is no topology"
        return "\n".join([self._fleet.last_errors(), f"{reads} reads", *errors, committed, topology])

    def stop(self) -> None:
        """Stop all processes."""
        if self._readers is not None:
            self._readers.stop()
        self._fleet.stop()
        self._relay.stop()

    def _begin(self) -> None:
        fleet = self._fleet
        self._options.report("starting Spark, two servers and two proxies ...")
        fleet.start_driver()
        eventually(
            lambda: fleet.record.committed() >= 0, awaited="the first epoch", timeout_s=START_S_MAX, error=ChaosError
        )
        fleet.start_standby()
        fleet.start_server("direct")
        relayed = fleet.start_server("relayed", advertise=self._relay.port)
        self._relay.route_to("127.0.0.1", relayed.port)
        eventually(
            lambda: fleet.record.online() == SERVERS,
            awaited="joining all servers",
            timeout_s=START_S_MAX,
            error=ChaosError,
        )
        self._readers = Readers([("127.0.0.1", fleet.start_proxy().port) for _ in range(2)])
        self._recover()

    def _run_event(self, event: Event) -> EventResult:
        assert self._readers is not None
        self._options.report(f"{event.name} ...")
        if event.needs_leader:
            ensure_manual_master(self._fleet)
            self._recover()
        self._readers.begin()
        undo = event.act(self._fleet, self._relay)
        self._watch(event.seen_s)
        if undo is not None:
            undo()
        began_s = time.monotonic()
        self._recover()
        return EventResult(event, self._readers.begin(), time.monotonic() - began_s)

    def _watch(self, seconds: float) -> None:
        """Wait, and compare the epochs that readers see with those in the log."""
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s:
            self._check_committed()
            time.sleep(POLL_INTERVAL_S)

    def _recover(self) -> None:
        """Wait until all keys are read at an epoch committed after this call, and all servers are up."""
        readers, fleet = self._readers, self._fleet
        assert readers is not None
        epoch_after = fleet.record.committed() + 1

        def is_well() -> bool:
            self._check_committed()
            return readers.is_at(epoch_after) and fleet.record.online() >= SERVERS

        eventually(is_well, awaited="recovery", timeout_s=RECOVER_S_MAX, error=ChaosError)

    def _check_committed(self) -> None:
        assert self._readers is not None
        newest = self._readers.newest
        if newest > self._fleet.record.committed():
            self._readers.record_uncommitted()


HEADLINE = "| event | replicas | reads | wrong answers | failed reads | longest without an answer for a key |\n"
RULE = "|---|---:|---:|---:|---:|---:|\n"


def row(replicas: int, result: EventResult) -> str:
    """Return a line of the table."""
    window = result.window
    wrong = f"**{window.wrong_replies()}**" if window.wrong else "0"
    return (
        f"| {result.event.name} | {replicas} | {window.reads:,} | {wrong} | {window.failed:,} | "
        f"{window.longest_s:.2f} s |\n"
    )


def write_page(rows: Sequence[str], lost: int) -> None:
    """Write the table into the page."""
    when = time.strftime("%Y-%m-%d", time.gmtime())
    summary = f"\nEpochs lost: {lost}. {when}, {machine()}.\n"
    write_section(PAGE, "chaos", f"{HEADLINE}{RULE}{''.join(rows)}{summary}")


def main() -> int:
    """Run the events; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 0], help="one run for each (default: 1 0)")
    parser.add_argument("--only", metavar="TEXT", help="only the events whose names contain this text")
    parser.add_argument("--no-write", action="store_true", help="do not change docs/reliability.md")
    given = parser.parse_args()
    end_in_order()
    events = [event for event in EVENTS if given.only is None or given.only in event.name]
    options, rows, lost, is_well = Options(), [], 0, True
    print(machine(), flush=True)
    print(f"{HEADLINE}{RULE}", end="", flush=True)
    try:
        for replicas in given.replicas:
            with temporary_folder() as folder:
                chaos = Chaos(folder, replicas, options)
                try:
                    for result in chaos.run(events):
                        options.report("")
                        rows.append(row(replicas, result))
                        print(rows[-1], end="", flush=True)
                        for reason, count in result.window.errors.most_common(5):
                            print(f"    {count} x {reason}", flush=True)
                        is_well = is_well and not result.window.wrong
                    lost += chaos.lost_epochs()
                except (ChaosError, SparkisError, OSError):
                    options.report("")
                    print(chaos.diagnostics(), file=sys.stderr)
                    raise
                finally:
                    options.report("")
                    chaos.stop()
    except (ChaosError, SparkisError, OSError) as error:
        print(f"python -m benchmarks.chaos: {error}", file=sys.stderr)
        return 1
    print(f"epochs lost: {lost}")
    if not given.no_write and given.only is None:
        write_page(rows, lost)
    return 0 if is_well and not lost else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("python -m benchmarks.chaos: interrupted")
