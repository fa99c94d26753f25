"""Real clients at sparkis beside redis-server: at a server, through a proxy, and at one address with an upstream.

Each client has a small program, written as people use it (`programs.py`), that is connected to both and repeats a
workload in turns. The ratio is that of the calls that were answered in a second. Replies are checked; a client whose
language is not installed is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from benchmarks.clients.places import Endpoint, Place, Scene
from benchmarks.clients.programs import KEYS, PROGRAMS, Outcome, Program, Running, Workload
from benchmarks.options import Options
from benchmarks.results import Row, compared_row
from benchmarks.servers import BenchmarkError, temporary_folder

PART = "clients"
# The seconds of a measurement, and of the one before the first that is not counted (guess: all end within ten minutes).
MEASUREMENT_S, WARM_UP_S = 0.2, 0.1
BUDGET = 0.5


def run(options: Options) -> Iterator[Row]:
    """Yield the rows of each client at each place."""
    programs = [(each, each.installed()) for each in PROGRAMS if _is_there(each, options)]
    failed: list[str] = []
    with temporary_folder() as folder, ExitStack() as stack:
        for place in Scene(folder, stack, KEYS).places():
            for program, command in programs:
                yield from rows_of(program, command, place, options, failed)
    if failed:
        raise BenchmarkError("\n".join([f"{len(failed)} rows have no number:", *failed]))


def _is_there(program: Program, options: Options) -> bool:
    if program.missing:
        options.report("")
        print(f"{program.name} is left out: {' and '.join(program.missing)} not found", flush=True)
    return not program.missing


def rows_of(
    program: Program, command: Sequence[str], place: Place, options: Options, failed: list[str], keys: int = KEYS
) -> Iterator[Row]:
    """Yield the rows of a client at a place; the errors of those that have no number are added to `failed`."""
    with ExitStack() as stack:
        pair = []
        for endpoint in (place.ours, place.redis):
            running = Running(program.name, command, endpoint.port, place.prefix, keys)
            stack.callback(running.stop)
            pair.append((running, endpoint))
        for workload in place.workloads:
            options.report(f"{program.name}, {place.name}, {workload.title}")
            try:
                row = _measured(program, place, workload, pair, options)
            except BenchmarkError as error:
                failed.append(f"{place.name}: {error}")
                continue
            yield row


def _measured(
    program: Program,
    place: Place,
    workload: Workload,
    pair: Sequence[tuple[Running, Endpoint]],
    options: Options,
) -> Row:
    found: list[list[tuple[Outcome, float]]] = [[] for _ in pair]  # with the processor time of each
    for running, _ in pair:
        running.measured(workload, WARM_UP_S * options.scale)
    for number in range(options.rounds):
        turn = list(zip(pair, found, strict=True))
        for (running, endpoint), outcomes in turn if number % 2 == 0 else turn[::-1]:  # alternate the order
            cpu_s = endpoint.cpu_s()
            outcome = running.measured(workload, MEASUREMENT_S * options.scale)
            outcomes.append((outcome, endpoint.cpu_s() - cpu_s))
    ours, theirs = ([each.requests / each.seconds for each, _ in outcomes] for outcomes in found)
    our_us, their_us = map(_cpu_us, found)
    return compared_row(
        ", ".join((program.name, place.name, workload.title)),
        PART,
        list(zip(ours, theirs, strict=True)),
        unit="calls/s",
        better="more",
        budget=BUDGET,
        ours_cpu_us=our_us,
        peer_cpu_us=their_us,
        note=program.version(),
    )


def _cpu_us(outcomes: Sequence[tuple[Outcome, float]]) -> float:
    """Return the processor time of a call: that of all rounds, as the system counts it in steps of 10 ms."""
    return sum(cpu_s for _, cpu_s in outcomes) / sum(each.requests for each, _ in outcomes) * 1e6
