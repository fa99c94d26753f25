"""What a request does beside its reply: statistics, the slow log, monitors, and the tracking of its keys."""

from __future__ import annotations

from resp_server.command.keys import keys_of
from resp_server.command.policy import SpecialCommand
from resp_server.command.table import Command, CommandTable
from resp_server.metrics.stats import CommandStats
from resp_server.pipeline.context import CommandContext
from resp_server.pipeline.long_requests import may_run_unsplit
from resp_server.protocol.replies import Pending, Sliced
from resp_server.protocol.request_parser import Request
from resp_server.session.session import Session
from resp_server.session.tracking import TrackingState


def keys_read(command: Command, request: Request) -> list[bytes]:
    """Return the keys that a request reads, so that its client may cache them."""
    facts = command.facts
    return [key for key, _ in keys_of(facts, request) or ()] if facts.key_specs and "readonly" in facts.flags else []


def record(
    context: CommandContext,
    command: Command,
    command_stats: CommandStats,
    request: Request,
    reply: bytes | Sliced | Pending,
    nanoseconds: int,
) -> None:
    """Record a request for monitors, and how long it took; for a reply in steps, after the last step."""
    session, server = context.session, context.server
    if isinstance(reply, Sliced):
        reply.on_finished = lambda more_ns: record(context, command, command_stats, request, b"", nanoseconds + more_ns)
        return
    if session.is_observed:
        server.observation.monitors.record(session, command, request)
    record_time(context, command, command_stats, request, nanoseconds)


def record_time(
    context: CommandContext, command: Command, command_stats: CommandStats, request: Request, nanoseconds: int
) -> None:
    """Record how long a request took."""
    command_stats.nanoseconds += nanoseconds
    command_stats.took[nanoseconds.bit_length()] += 1
    if nanoseconds >= context.server.observation.slow_ns:
        context.server.observation.slow_requests.record(context.session, command, request, nanoseconds)


def count_forwarded(context: CommandContext, command: Command, request: Request) -> None:
    """Count a request that other processes answer, and send it to monitors."""
    session, server = context.session, context.server
    session.last_command = command.name
    server.stats.command_stats(command.name).calls += 1
    if session.is_observed:
        server.observation.monitors.record(session, command, request)


def end_caching(session: Session, table: CommandTable, request: Request) -> None:
    """End CLIENT CACHING after the next request, or after the transaction."""
    tracking_state = session.tracking_state
    if tracking_state is not None and tracking_state.is_caching_set:
        is_exec = table.special_of(request) is SpecialCommand.EXEC
        if is_exec or (session.transaction is None and not table.keeps_caching(request)):
            tracking_state.is_caching_set = False


def track(context: CommandContext, tracking_state: TrackingState, command: Command, request: Request) -> None:
    """Send a client's pending invalidations before its reply, then record the keys that the request reads.

    Recording may evict keys. Their invalidations are sent after the reply, so the order matters.
    """
    push_invalidations(context, tracking_state)
    if tracking_state.records_reads and may_run_unsplit(request):  # a longer one records keys by chunk
        context.server.tracking.record_keys(tracking_state, keys_read(command, request))


def push_invalidations(context: CommandContext, tracking_state: TrackingState) -> None:
    """Send a client's pending invalidations."""
    session, server = context.session, context.server
    if tracking_state.redirect and tracking_state.has_pending:
        server.clients.push_invalidations(tracking_state)
    elif tracking_state.has_pending:
        server.clients.push(session.id, server.take_invalidations(session))
