"""Runs commands over this process' own stores. A reply comes at once, in steps, or when other workers have replied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any

from resp_server.acl.denial import EXEC_DENIAL, EXEC_DENIAL_REASONS, Denial
from resp_server.backends.stores.compiled import fast_path_of
from resp_server.command.policy import Split
from resp_server.command.table import Command
from resp_server.metrics.stats import CommandStats
from resp_server.pipeline.admission import Check, check, record_denial
from resp_server.pipeline.context import CommandContext, ServerContext
from resp_server.pipeline.effects import keys_read, record, track
from resp_server.pipeline.error_replies import error_reply
from resp_server.pipeline.immediate import ImmediatePipeline
from resp_server.pipeline.long_requests import in_chunks, split_of
from resp_server.pipeline.pipeline import release_reply
from resp_server.protocol.errors import NoPermError
from resp_server.protocol.replies import IncompleteReply, Pending, Sliced, encode
from resp_server.protocol.request_parser import LongRequest, Request

# Returns how a long request is split; None: it runs unsplit.
SplitOf = Callable[[Command, Request], Split | None]


class StoresBackend:
    """Runs the commands of one server.

    Args:
        check: Raises the error of a chunk of a long request that may not run.
    """

    def __init__(self, server: ServerContext, check: Check = check, split_of: SplitOf = split_of) -> None:
        self._server, self._check, self._split_of = server, check, split_of

    def answer(
        self, context: CommandContext, command: Command, request: Request, started_ns: int
    ) -> bytes | IncompleteReply:
        """Run a request, with its effects; return its reply, or its error."""
        command_stats = self._server.stats.command_stats(command.name)
        reply: bytes | Sliced | Pending = self.run(context, command, command_stats, [request])[0]
        command_stats.calls += 1  # after the run: INFO does not count itself before its time is known
        try:
            record(context, command, command_stats, request, reply, perf_counter_ns() - started_ns)
            if context.session.tracking_state is not None:
                track(context, context.session.tracking_state, command, request)
        except Exception as error:
            release_reply(reply)
            if context.session.tracking_state is not None:
                context.session.close()  # its cache could be stale without an invalidation
            return self.error_reply(error)
        return reply

    def answer_queued(self, context: CommandContext, request: Request) -> bytes | Sliced | Pending:
        """Run a queued request of an EXEC, with its effects; return its reply, or its error."""
        started_ns = perf_counter_ns()
        reply: bytes | Sliced | Pending | None = None
        try:
            command = self._server.table.find(request)
            command_stats = self._server.stats.command_stats(command.name)
            denied: Denial | None = context.session.user.denial(command, request)
            if denied is not None:  # the user's rights were changed meanwhile
                command_stats.calls += 1
                command_stats.failed += 1
                record_denial(context, command, request, denied)
                return self.error_reply(NoPermError(EXEC_DENIAL.format(EXEC_DENIAL_REASONS[denied.reason])))
            reply = self.run(context, command, command_stats, [request])[0]
            command_stats.calls += 1
            record(context, command, command_stats, request, reply, perf_counter_ns() - started_ns)
            return reply
        except Exception as error:
            release_reply(reply)
            return self.error_reply(error)

    def run(
        self, context: CommandContext, command: Command, command_stats: CommandStats, requests: Sequence[Request]
    ) -> list[Any]:
        """Answer the first requests of one command, at least one; an incomplete reply is the only one."""
        try:
            first = requests[0]
            if type(first) is LongRequest and (split := self._split_of(command, first)) is not None:
                return [self._in_chunks(context, command, split, first)]
            replies = command.execute(context, requests)
            kind = type(replies[0])
            if kind is Sliced or kind is Pending:
                return replies
            protocol = context.session.protocol
            return [
                b"$%d\r\n%b\r\n" % (len(reply), reply) if type(reply) is bytes else encode(reply, protocol)
                for reply in replies
            ]
        except Exception as error:
            command_stats.failed += 1
            return [self.error_reply(error)]

    def _in_chunks(self, context: CommandContext, command: Command, split: Split, request: Request) -> Sliced:
        """Answer a long request in chunks."""
        tracking_state = context.session.tracking_state

        def record_keys(chunk: Request) -> None:
            if tracking_state is not None and tracking_state.records_reads:
                self._server.tracking.record_keys(tracking_state, keys_read(command, chunk))

        return in_chunks(context, command, split, request, self._check, record_keys)

    def error_reply(self, error: Exception) -> bytes:
        """Return the error reply for an exception."""
        return error_reply(self._server, error)


def pipeline_of_stores(server: ServerContext) -> ImmediatePipeline:
    """Return the pipeline of a server that has stores."""
    return ImmediatePipeline(server, StoresBackend(server), check, fast_path_of(server))
