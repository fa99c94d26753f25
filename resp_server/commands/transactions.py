"""Transactions: EXEC runs the queued commands at one epoch of each job and at one clock reading.

STATE AT, STATE HOLD, STATE MARK and STATE EXPECT are for proxies, whose requests span several servers. So is STATE
NOTICE: a request of a proxy's client waits until the server has an epoch that another one has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from resp_server.command.handler import OneOrMore, command, integer
from resp_server.command.spec import ONE_KEY, argument, block, our_facts
from resp_server.commands.sliced_reply import batched, sliced_reply
from resp_server.commands.state import check_reads_all_keys
from resp_server.pipeline.context import CommandContext
from resp_server.pipeline.watch import watched_version_of
from resp_server.protocol.errors import GenericError, syntax_error
from resp_server.protocol.replies import OK, FirstOf, Reply
from resp_server.session.transaction import ReadPoint, WatchedVersion, check_watch_limits
from state_backend.store.keyspace import KeyspaceView

# Keys that WATCH reads in one step: about a millisecond (guess: some 10 us each).
WATCH_BATCH_KEYS = 128

JOB, TERM, EPOCH = argument("job"), argument("term", "integer"), argument("epoch", "integer")


@command("multi")
def multi(context: CommandContext) -> Reply:
    """Starts a transaction."""
    if context.session.transaction is not None:
        raise GenericError("MULTI calls can not be nested")
    context.session.begin_transaction()
    return OK


@command("discard")
def discard(context: CommandContext) -> Reply:
    """Discards a transaction."""
    if context.session.transaction is None:
        raise GenericError("DISCARD without MULTI")
    context.session.end_transaction()
    return OK


@command("exec")
def exec_(context: CommandContext) -> Reply:
    """Executes all commands in a transaction."""
    raise GenericError("EXEC without MULTI")  # the pipeline runs a transaction


@command(
    "state|at",
    ours=our_facts(
        "O(N) where N is the number of jobs",
        "readonly loading stale fast no_multi",
        "@read @fast @transaction",
        block("epoch", JOB, TERM, EPOCH, flags=["optional", "multiple"]),
        argument("clock_ms", "unix-time"),
    ),
)
def state_at(context: CommandContext, *arguments: OneOrMore) -> Reply:
    """Makes the next EXEC read at these epochs, one of each job, and at this clock reading."""
    check_reads_all_keys(context)
    *rows, clock = arguments
    if len(rows) % 3:
        raise syntax_error()
    epochs = {
        job.decode("utf-8", "surrogateescape"): (integer(term), integer(epoch))
        for job, term, epoch in zip(rows[::3], rows[1::3], rows[2::3], strict=True)
    }
    context.session.read_point = ReadPoint(epochs, integer(clock))
    return OK


@command(
    "state|notice", ours=our_facts("O(1)", "readonly loading stale fast no_multi", "@read @fast", JOB, TERM, EPOCH)
)
def state_notice(context: CommandContext, job: bytes, term: int, epoch: int) -> Reply:
    """Has this server look for an epoch of a job at once, because another server has it; nothing of this is served."""
    check_reads_all_keys(context)
    name = job.decode("utf-8", "surrogateescape")
    reached = context.server.view.term_epochs().get(name)
    if reached is None or reached < (term, epoch):
        context.server.epochs.on_awaited(name, epoch, term)
    return OK


@command(
    "state|hold",
    ours=our_facts(
        "O(1)",
        "readonly loading stale fast no_multi",
        "@read @fast @transaction",
        JOB,
        block("epoch", TERM, EPOCH, flags=["optional"]),
    ),
)
def state_hold(context: CommandContext, name: bytes, *arguments: bytes) -> Reply:
    """Makes all clients read a job at an earlier epoch while its log cannot be read; without an epoch, ends this."""
    check_reads_all_keys(context)
    job = name.decode("utf-8", "surrogateescape")
    if not arguments:
        context.server.epochs.held.release(job)
        return OK
    if len(arguments) != 2:
        raise syntax_error()
    if not context.server.epochs.held.hold(job, (integer(arguments[0]), integer(arguments[1]))):
        raise context.server.epochs.no_epoch()
    return OK


@command("watch")
def watch(context: CommandContext, *keys: OneOrMore) -> Reply:
    """Monitors changes to keys to determine the execution of a transaction."""
    session = context.session
    if session.transaction is not None:
        raise GenericError("WATCH inside MULTI is not allowed")
    new = [key for key in dict.fromkeys(keys) if (session.db, key) not in session.watched]
    check_watch_limits(session.watched, new)
    if len(new) <= WATCH_BATCH_KEYS:
        _watch(context, context.view, new)
        return OK
    reply = sliced_reply(context, lambda view: _watch_in_batches(context, view, new), FirstOf)
    reply.has_effect = True
    return reply


def _watch_in_batches(context: CommandContext, view: KeyspaceView, keys: Sequence[bytes]) -> Iterator[Sequence[Reply]]:
    for batch in batched(keys, WATCH_BATCH_KEYS):
        _watch(context, view, batch)
        yield []
    yield [OK]


def _watch(context: CommandContext, view: KeyspaceView, keys: Sequence[bytes]) -> None:
    """Record the keys' marks: of all keys, or of none if one cannot be read."""
    marks = {(context.session.db, key): watched_version_of(context.server.process.run_id, view, key) for key in keys}
    context.session.watched.update(marks)


@command("unwatch")
def unwatch(context: CommandContext) -> Reply:
    """Forgets about watched keys of a transaction."""
    context.session.watched = {}
    return OK


@command(
    "state|mark", ours=our_facts("O(1)", "readonly fast", "@read @fast @transaction", argument("key"), keys=ONE_KEY)
)
def state_mark(context: CommandContext, key: bytes) -> bytes:
    """Returns the mark that WATCH would record for a key. STATE EXPECT takes it."""
    return watched_version_of(context.server.process.run_id, context.view, key).text


@command(
    "state|expect",
    ours=our_facts(
        "O(N) where N is the number of keys",
        "readonly loading stale fast no_multi",
        "@read @fast @transaction",
        block("watched", argument("key"), argument("mark"), flags=["multiple"]),
    ),
)
def state_expect(context: CommandContext, *arguments: OneOrMore) -> Reply:
    """Makes the next EXEC reply nil if one of these keys has changed since its mark."""
    if len(arguments) % 2:
        raise syntax_error()
    check_reads_all_keys(context)
    marks = {key: WatchedVersion.parse(text) for key, text in zip(arguments[::2], arguments[1::2], strict=True)}
    check_watch_limits(context.session.watched, marks)
    context.session.watched.update({(0, key): mark for key, mark in marks.items()})
    return OK
