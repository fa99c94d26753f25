"""SLOWLOG: the requests that took longer than `slowlog-log-slower-than` microseconds.

A request is timed from the look-up of its command to its reply; the times of a sliced reply's steps are added up.
Requests that the compiled core processes together are timed together: a slow buffer is one entry, with the arguments of
the first request and the number of further requests. With a threshold below a millisecond that would be too coarse, so
the compiled core then processes no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from resp_server.command.handler import command, integer_at_least, worker_query
from resp_server.metrics.slow_log import SlowRequest
from resp_server.pipeline.context import CommandContext, ServerContext, ok
from resp_server.protocol.replies import Reply

COUNT = 10


@command("slowlog|get")
def slowlog_get(context: CommandContext, count: bytes | None = None) -> Reply:
    """Returns the slow log's entries."""
    requested = COUNT
    if count is not None:
        requested = integer_at_least(count, -1, "count should be greater than or equal to -1")
    entries_max = context.server.config.slowlog_max_len
    count_max = entries_max if requested < 0 else min(requested, entries_max)
    if context.server.workers is None:
        return _rows(context.server.observation.slow_requests.log.newest(count_max))

    def merge(responses: Sequence[list[list[Any]]]) -> Reply:
        found = [SlowRequest.from_json(each) for response in responses for each in response]
        found.sort(key=lambda entry: (entry.at_ms, entry.id), reverse=True)
        return _rows(found[:count_max])

    return context.server.gather(slow_requests, count_max, merge)


def _rows(entries: Sequence[SlowRequest]) -> Reply:
    return [
        (number, at_ms // 1000, microseconds, arguments, address.encode(), name)
        for number, at_ms, microseconds, arguments, address, name in entries
    ]


@worker_query("slow requests")
def slow_requests(server: ServerContext, count: int) -> list[list[Any]]:
    """Return this process's newest slow requests."""
    return [each.to_json() for each in server.observation.slow_requests.log.newest(count)]


@command("slowlog|len")
def slowlog_len(context: CommandContext) -> Reply:
    """Returns the number of entries in the slow log."""
    entries_max = context.server.config.slowlog_max_len
    return context.server.gather(slow_count, None, lambda responses: min(sum(responses), entries_max))


@worker_query("slow count")
def slow_count(server: ServerContext, nothing: None) -> int:
    """Return the number of this process's slow requests."""
    return len(server.observation.slow_requests.log)


@command("slowlog|reset")
def slowlog_reset(context: CommandContext) -> Reply:
    """Clears all entries from the slow log."""
    return context.server.gather(clear_slow_requests, None, ok)


@worker_query("clear slow requests")
def clear_slow_requests(server: ServerContext, nothing: None) -> None:
    """Remove this process's slow requests."""
    server.observation.slow_requests.log.clear()


@command("slowlog|help")
def slowlog_help(context: CommandContext) -> Reply:
    """Show helpful text about the different subcommands"""
    return context.server.table.help("slowlog")
