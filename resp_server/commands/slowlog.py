"""SLOWLOG: the requests that took longer than `slowlog-log-slower-than` microseconds.

A request is timed from its look-up to its reply; one that is answered in steps by all of these. Requests that are
answered together the short way are timed together: a buffer of them that takes too long is one entry, with the first
request's words and how many followed. Below a millisecond that would be wrong too often, so that then no request takes
the short way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from resp_server.command_table.declaration import command, integer, question
from resp_server.execution.context import CommandContext, ServerContext
from resp_server.metrics.slow_log import SlowRequest
from resp_server.protocol.errors import PlainError, ReplyError
from resp_server.protocol.replies import OK, Reply

COUNT = 10


@command("slowlog|get")
def slowlog_get(context: CommandContext, count: bytes | None = None) -> Reply:
    """Returns the slow log's entries."""
    requested = COUNT if count is None else _count(count)
    entries_max = context.server.config.slow_entries_max
    count_max = entries_max if requested < 0 else min(requested, entries_max)

    def merge(responses: Sequence[list[list[Any]]]) -> Reply:
        found = [SlowRequest.from_json(each) for response in responses for each in response]
        found.sort(key=lambda entry: (entry.at_ms, entry.id), reverse=True)
        return [_row(each) for each in found[:count_max]]

    return context.server.gather(slow_requests, count_max, merge)


def _count(word: bytes) -> int:
    try:
        count = integer(word)
    except ReplyError:
        count = -2
    if count < -1:
        raise PlainError("count should be greater than or equal to -1")
    return count


def _row(entry: SlowRequest) -> Reply:
    return [
        entry.id,
        entry.at_ms // 1000,
        entry.microseconds,
        list(entry.words),
        entry.address.encode(),
        entry.name,
    ]


@question("slow requests")
def slow_requests(server: ServerContext, count: int) -> list[list[Any]]:
    """Return the newest slow requests of this process."""
    return [each.to_json() for each in server.slow.newest(count)]


@command("slowlog|len")
def slowlog_len(context: CommandContext) -> Reply:
    """Returns the number of entries in the slow log."""
    entries_max = context.server.config.slow_entries_max
    return context.server.gather(slow_count, None, lambda responses: min(sum(responses), entries_max))


@question("slow count")
def slow_count(server: ServerContext, nothing: None) -> int:
    """Return how many slow requests this process keeps."""
    return len(server.slow)


@command("slowlog|reset")
def slowlog_reset(context: CommandContext) -> Reply:
    """Clears all entries from the slow log."""
    return context.server.gather(clear_slow_requests, None, lambda responses: OK)


@question("clear slow requests")
def clear_slow_requests(server: ServerContext, nothing: None) -> None:
    """Forget the slow requests of this process."""
    server.slow.clear()


@command("slowlog|help")
def slowlog_help(context: CommandContext) -> Reply:
    """Show helpful text about the different subcommands"""
    return context.server.table.help("slowlog")
