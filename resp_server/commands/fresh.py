"""STATE FRESH: rows of a query in Real-Time Mode, whose values are shown before their commit. Redis has no such thing.

The query's writer (see docs/real-time.md) is its only user. Each server of a job gets all rows, and keeps those of its
own slots.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from resp_server.command.handler import OneOrMore, command, integer, worker_query
from resp_server.command.spec import argument, our_facts
from resp_server.pipeline.context import CommandContext, ServerContext
from resp_server.protocol.errors import GenericError, NoPermError, client_text, syntax_error
from resp_server.protocol.replies import OK, Pending, Reply
from state_backend.fresh.values import FreshValues, folder_of
from state_backend.lmdb.store import LmdbStore
from state_backend.model.errors import SparkisError
from state_backend.store.keyspace import Job

if TYPE_CHECKING:
    from state_backend.fresh.writer import FreshWriter

# The module that decodes rows. It imports pyarrow, which takes half a second: in a thread, at the first row.
WRITER = "state_backend.fresh.writer"
IMPORT_S_MAX = 60.0
ARGUMENTS = {b"OPEN": 1, b"ROWS": 1, b"CLOSE": 2}  # after the partition


@command(
    "state|fresh",
    ours=our_facts(
        "O(N) where N is the number of rows",
        "admin noscript no_multi",
        "@admin @slow @dangerous",
        argument("action"),
        argument("job"),
        argument("run"),
        argument("batch", "integer"),
        argument("partition", "integer"),
        argument("content", "string", "multiple"),
    ),
)
def state_fresh(
    context: CommandContext, action: bytes, job: bytes, run: bytes, batch: bytes, partition: bytes, *content: OneOrMore
) -> Reply:
    """Takes rows of a batch that is not committed yet: OPEN with their schema, ROWS, and CLOSE."""
    verb = action.upper()
    if verb not in ARGUMENTS or len(content) != ARGUMENTS[verb]:
        raise syntax_error()
    request = _Request(_job(context, job).name, run.decode("utf-8", "replace"), integer(batch), integer(partition))
    if hasattr(sys.modules.get(WRITER), "FreshWriter"):  # its import has ended
        return _answer(context, verb, request, content)
    pending = Pending(IMPORT_S_MAX, lambda: _answer(context, verb, request, content))
    importing = asyncio.get_running_loop().run_in_executor(None, import_module, WRITER)
    importing.add_done_callback(lambda _: pending.resolve(lambda: _answer(context, verb, request, content)))
    return pending


class _Request:
    """What every STATE FRESH has."""

    def __init__(self, job: str, run: str, batch: int, partition: int) -> None:
        self.job, self.run, self.batch, self.partition = job, run, batch, partition


def _answer(context: CommandContext, verb: bytes, request: _Request, content: Sequence[bytes]) -> Reply:
    server = context.server
    committed = server.view.snapshot_of(request.job)
    numbers = request.run, request.batch, request.partition
    try:
        if verb == b"OPEN":
            show_fresh_values.respond(server, request.job)
            if server.workers is not None:
                server.workers.query(show_fresh_values.name, request.job, lambda responses: None)
            _writer(server, request.job).open_batch(*numbers, content[0], committed.applied.epoch)
        elif verb == b"ROWS":
            _writer(server, request.job).put(*numbers, content[0], committed, server.clock())
        else:
            _writer(server, request.job).close_batch(*numbers, integer(content[1]))
    except SparkisError as error:
        raise GenericError(str(error)) from None
    return OK


@worker_query("show fresh values")
def show_fresh_values(server: ServerContext, name: str) -> None:
    """Show a job's fresh values to the clients of this process. Called for each batch."""
    job, bytes_max = server.keyspace.jobs.get(name), server.config.fresh_values_max_bytes
    if job is None or not isinstance(job.store, LmdbStore):
        return
    if isinstance(job.fresh, FreshValues):
        job.fresh.bytes_max = bytes_max  # CONFIG SET may have changed it
    elif job.fresh is None:
        folder = folder_of(job.store.path, server.process.run_id)
        server.keyspace.show_fresh(name, FreshValues(folder, job.generation, bytes_max))


def _writer(server: ServerContext, name: str) -> FreshWriter:
    """Return what writes a job's rows here; GenericError if no batch was opened since the job has its store."""
    from state_backend.fresh.writer import FreshWriter

    job = server.keyspace.jobs[name]
    if not isinstance(job.fresh, FreshValues):
        raise GenericError(f"no batch of job '{name}' is open here: its store has changed; send STATE FRESH OPEN")
    writer = server.fresh_writers.get(name)
    if writer is None or writer.values is not job.fresh or writer.states is not job.states:
        writer = server.fresh_writers[name] = FreshWriter(job.fresh, name, job.states)
    return writer


def _job(context: CommandContext, name: bytes) -> Job:
    """Return a job whose keys the user may all read; other users do not learn of it."""
    text = name.decode("utf-8", "replace")
    for visible in context.visibility.jobs():
        if visible.job.name == text:
            if not visible.is_fully_visible:
                raise NoPermError("This needs a user that may read all keys of the job")
            if visible.job.is_stale:
                raise GenericError(f"job '{text}' has no writer of committed epochs now: its values are not shown")
            return visible.job
    raise GenericError(f"no such job '{client_text(name)}'")


@command(
    "state|freshness",
    ours=our_facts("O(1)", "readonly loading stale fast", "@read @fast @connection", argument("mode")),
)
def state_freshness(context: CommandContext, mode: bytes) -> Reply:
    """Sets whether this connection reads values that are not committed yet: RECORD, or COMMITTED."""
    wanted = mode.upper()
    if wanted not in (b"RECORD", b"COMMITTED"):
        raise syntax_error()
    context.session.set_reads_committed(wanted == b"COMMITTED")
    return OK
