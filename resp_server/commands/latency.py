"""LATENCY: events that took longer than `latency-monitor-threshold` milliseconds, and latency histograms.

Events are slow requests (`command`, or `fast-command` for commands with the flag `fast`) and delays of the event loop
(`event-loop`, checked once a second). Histograms have the times that INFO counts; requests that were processed
together count with their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from resp_server.command.handler import command, worker_query
from resp_server.metrics.latency import LatencyEvents, LatencySample, LatencyTimeSeries
from resp_server.metrics.stats import CommandStats, Stats
from resp_server.pipeline.context import CommandContext, ServerContext
from resp_server.protocol.errors import GenericError, client_text
from resp_server.protocol.replies import Reply, Verbatim

# As Redis draws a graph: samples per line, rows, and the characters of a row from low to high.
GRAPH_COLUMNS = 80
GRAPH_ROWS = 4
GRAPH_STEPS = "_o#"

# The first bucket of LATENCY HISTOGRAM ends at 1024 ns, each further one at twice the end of the one before. The name
# of a bucket is the largest time that Redis' histogram does not distinguish from its end: a 128th above it.
FIRST_BITS = 10

MONITORING_OFF = (
    "I'm sorry, Dave, I can't do that. Latency monitoring is disabled in this Redis instance. You may use \"CONFIG SET "
    "latency-monitor-threshold <milliseconds>.\" in order to enable it. If we weren't in a deep space mission I'd "
    "suggest to take a look at https://redis.io/topics/latency-monitor.\n"
)
NO_SPIKES = (
    "Dave, no latency spike was observed during the lifetime of this Redis instance, not in the slightest bit. I "
    "honestly think you ought to sit down calmly, take a stress pill, and think things over.\n"
)
ADVICE = {
    "command": "SLOWLOG GET names the requests that took longest: long replies are best read in parts (HSCAN, LRANGE).",
    "fast-command": "Requests that should be fast were delayed: look for other load on this machine's cores.",
    "event-loop": "The event loop was delayed: other load on the machine's cores, or too many clients for the workers.",
}


@worker_query("latency events")
def latency_events(server: ServerContext, nothing: None) -> Mapping[str, Any]:
    """Return this process's latency events."""
    return server.observation.slow_requests.latency.to_json()


@worker_query("reset latency events")
def reset_latency_events(server: ServerContext, names: list[str]) -> list[str]:
    """Remove events of this process, all if `names` is empty; return the names of those removed."""
    latency = server.observation.slow_requests.latency
    removed = [name for name in names or latency.by_name if name in latency.by_name]
    latency.reset(removed)
    return removed


def _of_events(context: CommandContext, make: Callable[[LatencyEvents], Reply]) -> Reply:
    """Return a reply about the events of all processes."""
    server = context.server
    if server.workers is None:
        return make(server.observation.slow_requests.latency)
    return server.gather(latency_events, None, lambda responses: make(LatencyEvents.merged(responses)))


@command("latency|latest")
def latency_latest(context: CommandContext) -> Reply:
    """Returns the latest latency samples for all events."""
    return _of_events(context, _latest)


def _latest(events: LatencyEvents) -> Reply:
    return [[name.encode(), *event.samples[-1], event.max_ms] for name, event in events.by_name.items()]


@command("latency|history")
def latency_history(context: CommandContext, event: bytes) -> Reply:
    """Returns timestamp-latency samples for an event."""

    def make(events: LatencyEvents) -> Reply:
        recorded = events.by_name.get(event.decode("latin-1"))
        return [] if recorded is None else [list(sample) for sample in recorded.samples]

    return _of_events(context, make)


@command("latency|reset")
def latency_reset(context: CommandContext, *events: bytes) -> Reply:
    """Resets the latency data for one or more events."""
    latency = context.server.observation.slow_requests.latency
    if context.server.workers is None and not latency.by_name:
        return 0
    names = [event.decode("latin-1") for event in events]

    def merge(responses: Sequence[list[str]]) -> Reply:
        return len({name for response in responses for name in response})

    return context.server.gather(reset_latency_events, names, merge)


@command("latency|graph")
def latency_graph(context: CommandContext, event: bytes) -> Reply:
    """Returns a latency graph for an event."""
    if context.server.workers is None and not context.server.observation.slow_requests.latency.by_name:
        raise _no_samples(event)

    def make(events: LatencyEvents) -> Reply:
        recorded = events.by_name.get(event.decode("latin-1"))
        if recorded is None:
            raise _no_samples(event)
        return Verbatim(
            graph(client_text(event), recorded, context.server.clock() // 1000).encode("utf-8", "surrogateescape")
        )

    return _of_events(context, make)


def _no_samples(event: bytes) -> GenericError:
    return GenericError(f"No samples available for event '{client_text(event)}'")


def graph(name: str, event: LatencyTimeSeries, now_s: int) -> str:
    """Draw an event's samples as Redis does; below each sample is its age, written downwards."""
    times = [milliseconds for _, milliseconds in event.samples]
    least, most = min(times), max(times)
    lines = [f"{name} - high {most} ms, low {least} ms (all time high {event.max_ms} ms)", "-" * GRAPH_COLUMNS]
    samples = list(event.samples)
    for start in range(0, len(samples), GRAPH_COLUMNS):
        lines += [""] * (start > 0)
        lines += _draw(samples[start : start + GRAPH_COLUMNS], least, most, now_s)
    return "\n".join(lines) + "\n"


def _draw(samples: Sequence[LatencySample], least: int, most: int, now_s: int) -> Iterator[str]:
    steps = GRAPH_ROWS * len(GRAPH_STEPS)
    heights = [min((each - least) * steps // ((most - least) or 1), steps - 1) for _, each in samples]
    for row in reversed(range(GRAPH_ROWS)):
        above = row * len(GRAPH_STEPS)
        yield "".join(" " if height < above else (GRAPH_STEPS + "|" * steps)[height - above] for height in heights)
    yield " " * len(samples)
    ages = [_age(now_s - second) for second, _ in samples]
    for index in range(max(map(len, ages))):
        yield "".join(age[index : index + 1] or " " for age in ages)


def _age(seconds: int) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


@command("latency|doctor")
def latency_doctor(context: CommandContext) -> Reply:
    """Returns a human-readable latency analysis report."""
    is_monitored = context.server.config.latency_monitor_threshold > 0
    return _of_events(context, lambda events: Verbatim(report(events, is_monitored).encode()))


def report(events: LatencyEvents, is_monitored: bool) -> str:
    """Return the report of LATENCY DOCTOR: each event's statistics, then advice."""
    if not events.by_name:
        return NO_SPIKES if is_monitored else MONITORING_OFF
    lines = [
        "Dave, I have observed latency spikes in this Redis instance. You don't mind talking about it, do you Dave?",
        "",
    ]
    for number, (name, event) in enumerate(events.by_name.items(), 1):
        times = [milliseconds for _, milliseconds in event.samples]
        mean = sum(times) // len(times)
        deviation = sum(abs(each - mean) for each in times) // len(times)
        seconds = event.samples[-1][0] - event.samples[0][0]
        lines.append(
            f"{number}. {name}: {len(times)} latency spikes (average {mean}ms, mean deviation {deviation}ms, period "
            f"{seconds / len(times):.2f} sec). Worst all time event {event.max_ms}ms."
        )
    lines += [
        "",
        "I have a few advices for you:",
        "",
        *(f"- {ADVICE[name]}" for name in events.by_name if name in ADVICE),
    ]
    return "\n".join(lines) + "\n"


@command("latency|histogram")
def latency_histogram(context: CommandContext, *names: bytes) -> Reply:
    """Returns the cumulative distribution of latencies of a subset or all commands."""
    requested = None if not names else _full_names(context, names)

    def merge(responses: Sequence[Any]) -> Reply:
        total = Stats()
        for response in responses:
            total.add(Stats.from_json(response))
        counted = total.commands if requested is None else [name for name in requested if name in total.commands]
        stats_by_name = {name: total.commands[name] for name in counted}
        return {
            name.encode(): histogram(command_stats)
            for name, command_stats in stats_by_name.items()
            if any(command_stats.took)
        }

    return context.server.gather(statistics, None, merge)


def _full_names(context: CommandContext, names: Sequence[bytes]) -> list[str]:
    """Return the full names of commands and of their subcommands; unknown names are left out."""
    commands = [each for each in map(context.server.table.get, names) if each is not None]
    all_names = [one.name for each in commands for one in (each, *each.subcommands.values())]
    return list(dict.fromkeys(all_names))


@worker_query("statistics")
def statistics(server: ServerContext, nothing: None) -> Mapping[str, Any]:
    """Return this process's command statistics."""
    return server.stats.to_json()


def histogram(command_stats: CommandStats) -> Reply:
    """Return the cumulative histogram: microseconds to the number of calls that took at most so long."""
    counts = [sum(command_stats.took[: FIRST_BITS + 1]), *command_stats.took[FIRST_BITS + 1 :]]
    rows = {}
    for step, (count, cumulative) in enumerate(zip(counts, accumulate(counts), strict=True)):
        if count:
            end_ns = 1 << (FIRST_BITS + step)
            rows[(end_ns + end_ns // 128 - 1) // 1000] = cumulative
    return {b"calls": sum(counts), b"histogram_usec": rows}


@command("latency|help")
def latency_help(context: CommandContext) -> Reply:
    """Returns helpful text about the different subcommands."""
    return context.server.table.help("latency")
