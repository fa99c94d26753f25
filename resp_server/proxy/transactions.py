"""MULTI ... EXEC over keys of several servers, at one epoch of each job; and WATCH.

The proxy queues the commands. EXEC sends one block to each owner of keys, in one write, with the epochs to read at and
the watched keys that must not have changed:

    STATE EXPECT key mark ...   STATE AT job term epoch ... clock   MULTI   its commands ...   EXEC

Each job is read at the newest epoch that any server has announced, so that no client sees epochs go back. A server that
is already at a later epoch keeps this one pinned for a short time. A server that has not reached the epoch, or no
longer pins it, replies NOEPOCH. Then all blocks are sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any, Protocol

from resp_server.execution.context import CommandContext
from resp_server.execution.exec_runner import NOTHING_RUN, ExecContext
from resp_server.forwarding.raw_replies import RawReply, Steps, as_bytes, is_error, raw_reply_of, result_of
from resp_server.forwarding.reply_splitter import pack
from resp_server.forwarding.reply_stages import (
    MALFORMED_REPLY_ERRORS,
    STEPS_NS_MAX,
    ReplySink,
    ReplyStage,
    malformed_reply,
)
from resp_server.protocol.errors import ReplyError, TryAgainError
from resp_server.protocol.replies import Pending, Sliced, SlicedEncoder
from resp_server.protocol.request_parser import Request
from resp_server.proxy.applications import Applications
from resp_server.proxy.request_policy import split_in_steps
from resp_server.proxy.requests import ServerRequest
from resp_server.proxy.server_connection import ConnectionKey
from resp_server.proxy.state_cluster import RETRY_ERRORS, StateCluster
from resp_server.proxy.transaction_plan import (
    SHORT_COMMANDS_MAX,
    CommandRouting,
    TransactionBlock,
    TransactionPlan,
    TransactionPlanner,
)
from resp_server.session.epoch_feed import JobEpoch, ReplyEpochs, epochs_in
from resp_server.session.transaction import Mark
from state_backend.model.slots import slot_of

# The pause before the blocks are sent again; it doubles each time. Servers apply an epoch some milliseconds apart.
PAUSE_S = 0.005
PAUSE_S_MAX = 0.1
# The blocks are sent again after so many lost connections. More losses mean that something is wrong.
LOSSES_MAX = 2


class QueuedCommands(CommandRouting, Protocol):
    """Answers the queued commands that the proxy itself answers, such as those without keys."""

    def answer_queued(self, context: CommandContext, request: Request) -> bytes | Sliced | Pending:
        """Return the reply to a queued command; it may be pending, or in steps."""

    def on_resolved(self, context: CommandContext, pending: Pending, then: Callable[[Any], object]) -> None:
        """Call back with a pending reply after it is resolved."""

    def error_reply(self, error: Exception) -> bytes:
        """Return the error reply for an exception."""


class StartableExec(Protocol):
    """One EXEC of a client."""

    def start(self, before: Steps[None]) -> None:
        """Run the transaction. before: steps to run first; a ReplyError that they raise becomes the reply."""


class ProxyExec(ReplyStage):
    """One EXEC of a client."""

    def __init__(
        self,
        dispatcher: QueuedCommands,
        applications: Applications,
        context: CommandContext,
        requests: Sequence[Request],
        watched: dict[tuple[int, bytes], Mark],
        sink: ReplySink,
        index: int,
    ) -> None:
        super().__init__(sink, index)
        self._dispatcher, self._applications, self._context = dispatcher, applications, context
        self._requests, self._watched = requests, watched
        self._defer = context.server.clients.defer
        self._queued = ExecContext(context.session, context.server, context.jobs)
        self._protocol = context.session.protocol
        self._deadline_s = applications.each[0].deadline_s(is_long=len(requests) > SHORT_COMMANDS_MAX)
        self._planner = TransactionPlanner(dispatcher, applications, context, self)
        self._plan = TransactionPlan()
        self._merging: Generator[Pending | None, bytes | None] | None = None
        # The epochs to read at, by application, and the visible jobs, by server address.
        self._epochs: dict[int, dict[str, JobEpoch]] = {}
        self._jobs: dict[str, set[str]] = {}
        self._incomplete_blocks = 0
        self._losses = 0
        self._pause_s = PAUSE_S

    def start(self, before: Steps[None]) -> None:
        """Send the transaction to the servers. before: steps to run first; their ReplyError becomes the reply."""
        self.attempt(self.run_steps, self._checked(before), lambda _: self._start(), self._defer)

    def receive(self, index: int, reply: RawReply, epochs: ReplyEpochs) -> None:
        """Finish with a reply of the proxy itself."""
        self.finish(reply, epochs)

    def _checked(self, before: Steps[None]) -> Steps[None]:
        try:
            yield from before
        except ReplyError as error:
            self.finish(self._dispatcher.error_reply(error))

    def _start(self) -> None:
        self.attempt(self.run_steps, self._make_plan(), lambda _: self._send(), self._defer)

    def _make_plan(self) -> Steps[None]:
        try:
            self._plan = yield from self._planner.plan(self._requests, self._watched)
        except ReplyError as error:
            self.finish(b"-%b\r\n" % error.line)
            return
        for number, _ in self._plan.blocks:
            self._set_epochs(number)

    def _set_epochs(self, number: int) -> None:
        """Set the epochs of an application to the newest that any of its servers has announced, unless they are set."""
        if number not in self._epochs:
            self._epochs[number] = dict(self._applications.each[number].newest)

    def _send(self) -> None:
        if self._is_over:
            return
        clock_ms = self._context.server.clock()
        self._incomplete_blocks = 1  # one too many, so that EXEC does not finish before all blocks are sent
        is_sent = True
        for (number, address), block in self._plan.blocks.items():
            jobs = self._jobs.setdefault(address, set(block.cluster.seen.get(address, ())))
            readable = block.cluster.outages.readable
            epochs = {job: readable(job, reached) for job, reached in self._epochs[number].items() if job in jobs}
            self._incomplete_blocks += 1
            if not block.send(epochs, clock_ms, self._protocol):
                self._incomplete_blocks -= 1
                is_sent = False
        self._incomplete_blocks -= 1
        if not is_sent:
            names = ", ".join(address for _, address in self._plan.blocks)
            self._retry(f"not all of {names} can be reached", self._send_again, is_last=self._lacks_a_server())
        elif not self._incomplete_blocks:
            self._finish()

    def _lacks_a_server(self) -> bool:
        """Return whether a server of the plan takes no requests for longer than this transaction may wait."""
        return any(block.is_given_up(self._protocol) for block in self._plan.blocks.values())

    def _send_again(self) -> None:
        if self._incomplete_blocks:  # replies to the earlier blocks are still missing
            self._retry("no server answered in time", self._send_again)
        else:
            self._start()

    def block_completed(self) -> None:
        """Handle a complete block; finish after the last one."""
        self._incomplete_blocks -= 1
        if not self._incomplete_blocks and all(block.is_complete for block in self._plan.blocks.values()):
            self.attempt(self._finish)

    # -- the servers' replies -----------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Finish with the reply, or send the blocks again."""
        self.run_steps(self._read_all(), self._handle_failed, self._defer)

    def _read_all(self) -> Steps[list[tuple[TransactionBlock, bytes]]]:
        """Read the servers' replies; return the blocks that did not run, with their errors."""
        failed = []
        try:
            for block in self._plan.blocks.values():
                error = yield from block.read()
                if error is not None:
                    failed.append((block, error))
        except MALFORMED_REPLY_ERRORS as error:
            self.finish(malformed_reply(error))
        return failed

    def _handle_failed(self, failed: Sequence[tuple[TransactionBlock, bytes]]) -> None:
        if self._is_over:
            return
        if not failed:
            self._merge_replies()
            return
        for block, error in failed:
            reply = as_bytes(block.replies[-1])
            if reply.startswith(b"-NOEPOCH "):
                self._adopt_pinned(block, reply)
            elif not self._may_retry(block, error):
                self.finish(error)
                return
        self._retry("the servers have no epoch in common", self._start)

    def _may_retry(self, block: TransactionBlock, error: bytes) -> bool:
        """Tell whether to try again: the slots have moved or are not ready, or a connection was lost."""
        if error.startswith(b"-MOVED "):
            block.cluster.refresh(block.address)
            return True
        if error.startswith(RETRY_ERRORS):
            return True
        self._losses += 1
        return block.head[:6] != b"-EXECA" and self._losses <= LOSSES_MAX

    def _adopt_pinned(self, block: TransactionBlock, reply: bytes) -> None:
        """Handle a NOEPOCH: if the server no longer pins the requested epoch, read at the next epoch that it pins."""
        number = next(number for (number, address) in self._plan.blocks if address == block.address)
        epochs, pinned, readable = self._epochs[number], pinned_epochs_in(reply), block.cluster.outages.readable
        self._jobs[block.address] = set(pinned)
        for job, reached in pinned.items():
            if job not in epochs:
                epochs[job] = reached[-1]
            elif readable(job, epochs[job]) not in reached:
                epochs[job] = min((each for each in reached if each > epochs[job]), default=epochs[job])
        awaited = {job: epochs[job] for job in pinned}
        block.cluster.connection(ConnectionKey(block.address, 2, False)).await_epochs(awaited)

    def _retry(self, reason: str, then: Callable[[], None], *, is_last: bool = False) -> None:
        """Call back after a pause; finish with an error if the deadline would be over then, or nothing can change."""
        now_s = self._applications.each[0].now_s
        if is_last or now_s + self._pause_s > self._deadline_s:
            self.finish(b"-%b\r\n" % TryAgainError(reason).line)
            return
        asyncio.get_running_loop().call_later(self._pause_s, self.attempt, then)
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)

    def _merge_replies(self) -> None:
        """Merge the servers' replies, unless a watched key changed."""
        if any(block.is_aborted for block in self._plan.blocks.values()):
            self.finish(NOTHING_RUN[self._protocol], tuple(self._epochs.values()))
            return
        self._merging = self._merge()
        self._continue()

    def _continue(self, reply: bytes | None = None) -> None:
        """Merge until the next pending reply, or for `STEPS_NS_MAX`. reply: the bytes of the last pending reply."""
        ends_ns = perf_counter_ns() + STEPS_NS_MAX
        made = self._merging
        assert made is not None
        try:
            while True:
                own, reply = made.send(reply), None
                if own is not None:
                    self._dispatcher.on_resolved(self._queued, own, partial(self.attempt, self._continue))
                    return
                if perf_counter_ns() >= ends_ns:
                    self._defer(partial(self.attempt, self._continue))
                    return
        except StopIteration:
            pass
        except MALFORMED_REPLY_ERRORS as error:
            self.finish(malformed_reply(error))

    def _merge(self) -> Generator[Pending | None, bytes | None]:
        """Merge the replies. Yields each pending reply and receives its bytes; yields None between steps."""
        replies: list[RawReply] = []
        blocks = list(self._plan.blocks.values())
        for number, (request, parts) in enumerate(zip(self._requests, self._plan.parts, strict=True)):
            if number in self._plan.errors:
                replies.append(self._dispatcher.error_reply(self._plan.errors[number]))
            elif parts is None:
                own = self._dispatcher.answer_queued(self._queued, request)
                if isinstance(own, Sliced):
                    own = yield from self._encoded(own)
                elif isinstance(own, Pending):
                    resolved = yield own
                    assert resolved is not None
                    own = resolved
                replies.append(own)
            else:
                steps = self._joined(request, [blocks[at].items[place] for at, place in parts])
                while True:
                    try:
                        next(steps)
                    except StopIteration as end:
                        replies.append(end.value)
                        break
                    yield None
            yield None
        tracking_state = self._context.session.tracking_state
        if tracking_state is not None:
            tracking_state.is_caching_set = False  # a queued CLIENT CACHING applies to this transaction only
        reply = raw_reply_of([b"*%d\r\n" % len(replies), *replies])
        self.finish(reply, tuple(self._epochs.values()))

    def _encoded(self, reply: Sliced) -> Generator[None, object, bytes]:
        """Encode a reply in steps. None of its steps waits for other processes."""
        encoder, out = SlicedEncoder(reply, self._protocol), []
        try:
            while not encoder.is_done:
                out.append(encoder.step())
                yield None
        except Exception as error:
            return self._dispatcher.error_reply(error)
        finally:
            encoder.close()
        return b"".join(out)

    def _joined(self, request: Request, found: Sequence[RawReply]) -> Steps[RawReply]:
        """Merge the replies to the parts of a queued command."""
        error = next(filter(is_error, found), None)
        if error is not None or len(found) == 1:
            return found[0] if error is None else error
        split = yield from split_in_steps(self._dispatcher.command(request).facts, request, self._dispatcher.target_of)
        assert split is not None
        merged: RawReply = yield from result_of(split[1](found))
        return merged


class ProxyWatch(ReplyStage):
    """One WATCH of a client: requests a mark of each key from its owner, and stores it in `watched`."""

    def __init__(
        self,
        watched: dict[tuple[int, bytes], Mark],
        targets: Sequence[tuple[StateCluster, bytes]],
        sink: ReplySink,
        index: int,
    ) -> None:
        super().__init__(sink, index)
        self._watched, self._targets = watched, targets
        self._missing = len(targets)
        self._error: bytes | None = None

    def send(self) -> None:
        """Send STATE MARK to the owners of the keys."""
        for at, (cluster, key) in enumerate(self._targets):
            packed = pack((b"STATE", b"MARK", key))
            cluster.send(ServerRequest(packed, slot_of(key), 2, cluster.deadline_s(), self, at))

    def receive(self, index: int, reply: RawReply, epochs: ReplyEpochs) -> None:
        """Store the mark of one key."""
        try:
            mark = as_bytes(reply)
            if is_error(mark):
                self._error = self._error or mark
            else:
                self._watched[0, self._targets[index][1]] = Mark.parse(mark.partition(b"\r\n")[2][:-2])
        except MALFORMED_REPLY_ERRORS as error:
            self._error = self._error or malformed_reply(error)
        self._missing -= 1
        if not self._missing:
            self.finish(self._error or b"+OK\r\n")


def pinned_epochs_in(reply: bytes) -> dict[str, list[JobEpoch]]:
    """Parse a NOEPOCH reply: the epochs of each job that a server pins, the newest last."""
    words = reply[:-2].decode("utf-8", "surrogateescape").split(" ")[1:]
    rows = zip(words[::2], words[1::2], strict=True)
    return {job: epochs_in(epochs.encode()) for job, epochs in rows}
