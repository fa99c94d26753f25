"""EXEC over keys of several servers, at one epoch of each job.

Each owner of keys gets one transaction, in one write, with the epochs to read at and the watched keys that must not
have changed:

    STATE EXPECT key mark ...   STATE AT job term epoch ... clock   MULTI   its commands ...   EXEC

Each job is read at the newest epoch that any server has announced, so that no client sees epochs go back. A server that
is already at a later epoch keeps this one pinned for a short time. A server that has not reached the epoch, or no
longer pins it, replies NOEPOCH. Then all transactions are sent again.
"""

from __future__ import annotations

from collections.abc import Sequence

from resp_server.backends.retries import ExecAttempts, is_passing
from resp_server.backends.servers.cluster_epochs import ClusterEpochs
from resp_server.backends.servers.request_split import split_in_steps
from resp_server.backends.servers.requests import ConnectionKey
from resp_server.backends.servers.state_cluster import StateCluster
from resp_server.backends.servers.transaction_plan import (
    SHORT_COMMANDS_MAX,
    QueuedCommands,
    ServerTransaction,
    TransactionPlan,
    TransactionPlanner,
)
from resp_server.pipeline.batched import resolved
from resp_server.pipeline.context import CommandContext, PinnedContext
from resp_server.pipeline.exec_runner import NOTHING_RUN
from resp_server.pipeline.transactions import BackendExec, Watched
from resp_server.protocol.errors import TryAgainError
from resp_server.protocol.replies import Pending, Sliced, SlicedEncoder
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.answers import Answer, StepPauses, all_of, run_in_steps
from resp_server.raw_replies.raw_reply import RawReply, Steps, as_bytes, is_error, raw_reply_of, result_of
from resp_server.raw_replies.reply_sinks import MALFORMED_REPLY_ERRORS, malformed_reply
from resp_server.session.epochs import JobEpoch, ReplyEpochs, epochs_in


class ServersExec(BackendExec):
    """One EXEC at state servers, at one epoch of each job."""

    def __init__(
        self,
        commands: QueuedCommands,
        planner: TransactionPlanner,
        cluster: StateCluster,
        context: CommandContext,
        requests: Sequence[Request],
        watched: Watched,
    ) -> None:
        self._commands, self._planner = commands, planner
        self._context = PinnedContext(context.session, context.server, context.jobs)
        self._requests, self._watched = requests, watched
        self._protocol = context.session.protocol
        self._defer = context.server.clients.defer
        self._epochs = EpochsToRead()
        deadline_s = cluster.deadline_s(is_long=len(requests) > SHORT_COMMANDS_MAX)
        self._attempts = ExecAttempts(cluster.pause, deadline_s)

    async def answer(self) -> Answer:
        """Plan, send and read, until all servers have run their transactions; then merge their replies."""
        while True:
            plan = await run_in_steps(
                self._planner.plan(self._context.session, self._requests, self._watched), self._defer
            )
            transactions = list(plan.transactions.values())
            if not await self._send(transactions):
                continue
            await all_of([each.complete for each in transactions])
            try:
                failed = await run_in_steps(_failed_in(transactions), self._defer)
                if not failed:
                    return await self._merged(plan, transactions)
            except MALFORMED_REPLY_ERRORS as error:
                return Answer(malformed_reply(error))
            for transaction, error_line in failed:
                if not self._may_try_again(transaction, error_line):
                    return Answer(error_line)
            await self._attempts.pause("the servers have no epoch in common")

    def has_read_newest(self) -> bool:
        """Return whether no server has announced a later epoch than those of the reply."""
        return self._epochs.are_newest

    async def _send(self, transactions: Sequence[ServerTransaction]) -> bool:
        """Send the transactions. If not all servers can be reached, return False when they may be sent again."""
        clock_ms, protocol = self._context.server.clock(), self._protocol
        sent = [each for each in transactions if each.send(self._epochs.of(each), clock_ms, protocol)]
        if len(sent) == len(transactions):
            return True
        reason = f"not all of {', '.join(transaction.address for transaction in transactions)} can be reached"
        if any(transaction.is_given_up(protocol) for transaction in transactions):
            raise TryAgainError(reason)  # for longer than this transaction may wait
        await self._attempts.pause(reason)
        while not all(each.complete.is_finished for each in sent):
            await self._attempts.pause("no server answered in time")
        await all_of([each.complete for each in sent])
        return False

    def _may_try_again(self, transaction: ServerTransaction, error: bytes) -> bool:
        """Handle the error of a server that did not run its transaction; return whether to send all of them again."""
        reply = as_bytes(transaction.replies[-1])
        if reply.startswith(b"-NOEPOCH "):
            self._epochs.take_pinned(transaction, pinned_epochs_in(reply))
            return True
        if error.startswith(b"-MOVED "):
            transaction.cluster.refresh(transaction.address)
            return True
        return is_passing(error) or (self._attempts.count_loss() and transaction.head[:6] != b"-EXECA")

    async def _merged(self, plan: TransactionPlan, transactions: Sequence[ServerTransaction]) -> Answer:
        """Merge the servers' replies with the proxy's own, unless a watched key has changed."""
        if any(transaction.is_aborted for transaction in transactions):
            return Answer(NOTHING_RUN[self._protocol], self._epochs.of_reply)
        replies: list[RawReply] = []
        pauses = StepPauses(self._defer)
        for number, (request, places) in enumerate(zip(self._requests, plan.places, strict=True)):
            if number in plan.errors:
                replies.append(self._commands.local.error_reply(plan.errors[number]))
            elif places is None:
                replies.append(await self._own_reply(request))
            else:
                found = [transactions[at].items[place] for at, place in places]
                is_complete = len(found) == 1
                replies.append(
                    found[0] if is_complete else await run_in_steps(self._joined(request, found), self._defer)
                )
            await pauses
        tracking_state = self._context.session.tracking_state
        if tracking_state is not None:
            tracking_state.is_caching_set = False  # a queued CLIENT CACHING applies to this transaction only
        return Answer(raw_reply_of([b"*%d\r\n" % len(replies), *replies]), self._epochs.of_reply)

    async def _own_reply(self, request: Request) -> RawReply:
        """Return the reply to a command that the proxy answers."""
        reply = self._commands.local.answer_queued(self._context, request)
        if isinstance(reply, Sliced):
            return await run_in_steps(self._encoded(reply), self._defer)
        if isinstance(reply, Pending):
            return (await resolved(self._context, reply)).reply
        return reply

    def _encoded(self, reply: Sliced) -> Steps[bytes]:
        """Encode a reply in steps. None of its steps waits for other processes."""
        encoder, out = SlicedEncoder(reply, self._protocol), []
        try:
            while not encoder.is_done:
                out.append(encoder.step())
                yield
        except Exception as error:
            return self._commands.local.error_reply(error)
        finally:
            encoder.close()
        return b"".join(out)

    def _joined(self, request: Request, found: Sequence[RawReply]) -> Steps[RawReply]:
        """Merge the replies to the parts of a queued command."""
        error = next(filter(is_error, found), None)
        if error is not None:
            return error
        split = yield from split_in_steps(self._commands.command(request), request, self._commands.target_of)
        assert split is not None
        merged: RawReply = yield from result_of(split[1](found))
        return merged


class EpochsToRead:
    """The epochs at which one EXEC reads."""

    def __init__(self) -> None:
        self._by_cluster: dict[int, dict[str, JobEpoch]] = {}
        self._announced: dict[int, ClusterEpochs] = {}
        self._jobs: dict[str, set[str]] = {}  # that each server has, by its address

    def of(self, transaction: ServerTransaction) -> dict[str, JobEpoch]:
        """Return the epochs for a server; at first the newest ones that any server of its cluster has announced."""
        cluster, address = transaction.cluster, transaction.address
        if transaction.cluster_index not in self._by_cluster:
            self._by_cluster[transaction.cluster_index] = dict(cluster.epochs.newest)
            self._announced[transaction.cluster_index] = cluster.epochs
        epochs = self._by_cluster[transaction.cluster_index]
        jobs = self._jobs.setdefault(address, set(cluster.epochs.newest_announced.get(address, ())))
        readable = cluster.epochs.outages.readable
        return {job: readable(job, reached) for job, reached in epochs.items() if job in jobs}

    def take_pinned(self, transaction: ServerTransaction, pinned: dict[str, list[JobEpoch]]) -> None:
        """Handle a NOEPOCH: if the server no longer pins the requested epoch, read at the next epoch that it pins."""
        cluster, address = transaction.cluster, transaction.address
        epochs, readable = self._by_cluster[transaction.cluster_index], cluster.epochs.outages.readable
        self._jobs[address] = set(pinned)
        for job, reached in pinned.items():
            if job not in epochs:
                epochs[job] = reached[-1]
            elif readable(job, epochs[job]) not in reached:
                epochs[job] = min((each for each in reached if each > epochs[job]), default=epochs[job])
        cluster.connection(ConnectionKey(address, 2, False)).await_epochs({job: epochs[job] for job in pinned})

    @property
    def are_newest(self) -> bool:
        """Whether servers have announced no others; during an outage it is not known which of them count."""
        return all(
            not announced.outages.common and announced.newest.items() <= self._by_cluster[at].items()
            for at, announced in self._announced.items()
        )

    @property
    def of_reply(self) -> ReplyEpochs:
        """The epochs that the reply is from."""
        return tuple(self._by_cluster.values())


def _failed_in(transactions: Sequence[ServerTransaction]) -> Steps[list[tuple[ServerTransaction, bytes]]]:
    """Read the servers' replies; return the transactions that did not run, with their errors."""
    failed = []
    for transaction in transactions:
        error = yield from transaction.read()
        if error is not None:
            failed.append((transaction, error))
    return failed


def pinned_epochs_in(reply: bytes) -> dict[str, list[JobEpoch]]:
    """Parse a NOEPOCH reply: the epochs of each job that a server pins, the newest last."""
    words = reply[:-2].decode("utf-8", "surrogateescape").split(" ")[1:]
    rows = zip(words[::2], words[1::2], strict=True)
    return {job: epochs_in(epochs.encode()) for job, epochs in rows}
