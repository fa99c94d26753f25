"""Sends requests to state servers: each to the server of its keys, or to several of them, or to all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any, cast

from resp_server.backends.servers.forwarder_sink import BatchForwarderSink
from resp_server.backends.servers.job_queries import JobQueries, server_sections, text_in
from resp_server.backends.servers.keyspace_queries import KeyspaceQuery
from resp_server.backends.servers.request_split import (
    TargetRequest,
    split_by_slot,
    within,
)
from resp_server.backends.servers.requests import ServerRequest
from resp_server.backends.servers.state_cluster import StateCluster
from resp_server.backends.servers.state_clusters import StateClusters, clash
from resp_server.backends.servers.tracked_reads import tracked
from resp_server.command.policy import AnsweredBy, SpecialCommand
from resp_server.command.table import Command
from resp_server.commands.generic import cursor
from resp_server.commands.sort import check_request
from resp_server.pipeline.batch import ReplyBatch
from resp_server.pipeline.context import CommandContext, ServerContext
from resp_server.pipeline.effects import keys_read
from resp_server.pipeline.immediate import ImmediateBackend
from resp_server.protocol.errors import (
    ClusterDownError,
    GenericError,
)
from resp_server.protocol.replies import encode
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.answers import (
    Answer,
    ReadSeenEpochs,
    Replies,
    ReplyFuture,
    StepPauses,
    run_into,
)
from resp_server.raw_replies.raw_reply import RawReply, as_bytes
from resp_server.raw_replies.reply_sinks import Merge
from resp_server.raw_replies.reply_splitter import pack
from resp_server.session.session import Session
from resp_server.session.tracking import TrackingState
from state_backend.model.slots import slot_of

# The parts of a request that are sent between two looks at the clock.
PARTS_AT_ONCE = 16


class StateSender:
    """Sends requests to the state servers behind a proxy, and joins their replies.

    Args:
        local: Makes the proxy's own part of INFO.

    Attributes:
        forwarder: Forwards an MGET; None: it is not built, or there are several clusters.
    """

    def __init__(self, server: ServerContext, clusters: StateClusters, local: ImmediateBackend) -> None:
        self._server, self._clusters, self._local = server, clusters, local
        self._stats, self._tracking, self._defer = server.stats, server.tracking, server.clients.defer
        self.forwarder: Any = None

    def send(
        self,
        command: Command,
        request: Request,
        session: Session,
        batch: ReplyBatch,
        answered_by: AnsweredBy = AnsweredBy.STATES,
    ) -> bool:
        """Add the pending reply to a request; False: the request is malformed, or needs no server."""
        protocol, is_suppressed = session.protocol, session.replies_suppressed
        if answered_by is AnsweredBy.ALL_KEYS:
            if command.policy.special is SpecialCommand.SCAN:
                cursor(request[1])  # raises for an invalid cursor
            query = KeyspaceQuery(self._clusters, request, protocol, batch.seen, within(session.user))
            batch.answer(query.answer, is_suppressed)
            return True
        if answered_by is AnsweredBy.ALL_JOBS:
            return self._query_jobs(command, request, session, batch)
        if answered_by is AnsweredBy.ONE_JOB:
            cluster = self._clusters_with(request[2].partition(b":")[0])[0]
            master = next(iter(cluster.slots.counts), None)
            if master is None:
                raise ClusterDownError
            send_to(cluster, pack((*within(session.user), *request)), 0, session, batch, is_suppressed, master)
            return True
        tracking_state = (
            session.tracking_state
            if session.tracking_state is not None and session.tracking_state.records_reads
            else None
        )
        if command.policy.special is SpecialCommand.STATE_HISTORY:
            self.answer_history(request, session, batch, request[2])
            return True
        is_mget = command.policy.special is SpecialCommand.MGET
        if (
            is_mget
            and tracking_state is None
            and not session.reads_committed
            and self._forward_mget(command, request, session, batch)
        ):
            return True
        found = split_by_slot(command, request, self.target_of)
        if found is None:
            return False
        parts, merge = found
        if command.policy.special is SpecialCommand.SORT_RO:
            check_request(session.user, request)
        if command.policy.special is SpecialCommand.STATE_LOCATE:
            merge = partial(self._with_address, key=request[2])
        elif len(parts) == 1 and tracking_state is None:
            number, slot = cast("tuple[int, int]", parts[0].target)
            send_to(self._clusters[number], pack(request), slot, session, batch, is_suppressed)
            return True
        cached_keys = partial(keys_read, command)
        batch.answer(
            lambda: self.parts_answer(parts, merge, session, batch.seen, tracking_state, cached_keys), is_suppressed
        )
        return True

    def answer_history(self, request: Request, session: Session, batch: ReplyBatch, cached_key: bytes) -> None:
        """Request a key's history after all earlier replies. It may take long, so later requests wait for it.

        Args:
            cached_key: The name by which the client caches the key.
        """
        batch.is_last = True
        if session.replies_suppressed:  # a read whose reply is suppressed has no effect
            return

        async def answering() -> Answer:
            await batch.earlier_replies()
            return await self.slow_answer(pack(request), request[2], cached_key, session, batch.seen, is_history=True)

        batch.answer(answering)

    async def slow_answer(
        self,
        packed: bytes,
        key: bytes,
        cached_key: bytes,
        session: Session,
        seen: ReadSeenEpochs,
        is_history: bool = False,
    ) -> Answer:
        """Answer a slow read of one key.

        Args:
            cached_key: The name by which the client caches the key.
        """
        number, slot = self.target_of(key)
        cluster, future, tracking_state = self._clusters[number], ReplyFuture(seen), session.tracking_state
        deadline_s = cluster.deadline_s(is_long=True)
        cluster.send(
            ServerRequest(
                packed,
                slot,
                session.protocol,
                deadline_s,
                future,
                0,
                is_long=True,
                is_history=is_history,
                is_committed=session.reads_committed,
            )
        )
        if tracking_state is None or not tracking_state.records_reads:
            return await future
        return await tracked(self._tracking, tracking_state, [cached_key], future)

    async def parts_answer(
        self,
        parts: Sequence[TargetRequest],
        merge: Merge,
        session: Session,
        seen: ReadSeenEpochs,
        tracking_state: TrackingState | None = None,
        cached_keys: Callable[[Request], Sequence[bytes]] = lambda part: (),
    ) -> Answer:
        """Answer a request by its parts.

        Args:
            cached_keys: Returns the names by which the client caches a part's keys.
        """
        replies, pauses = Replies(seen, len(parts)), StepPauses(self._defer)
        for index, part in enumerate(parts):
            if index % PARTS_AT_ONCE == PARTS_AT_ONCE - 1:
                await pauses
            number, slot = cast("tuple[int, int]", part.target)
            cluster = self._clusters[number]
            request = ServerRequest(pack(part.request), slot, session.protocol, cluster.deadline_s(), replies, index)
            request.is_committed = session.reads_committed
            if tracking_state is not None:
                future = ReplyFuture(seen)
                request.sink, request.index = future, 0
                answering = tracked(self._tracking, tracking_state, cached_keys(part.request), future)
                run_into(answering, replies, index)
            cluster.send(request)
        return await replies.merge(merge, self._defer)

    def _forward_mget(self, command: Command, request: Request, session: Session, batch: ReplyBatch) -> bool:
        """Forward an MGET through the forwarder, one request per server; False if this is not possible now."""
        if self.forwarder is None or len(request) < 3:
            return False
        # Earlier requests of this pipeline use the same connections, so they are not answered from a later epoch.
        forwarder, protocol, packed = self.forwarder, session.protocol, pack(request)
        index = batch.expect(session.replies_suppressed)

        def send_by_slots() -> None:
            found = split_by_slot(command, request, self.target_of)
            assert found is not None  # it has keys
            run_into(self.parts_answer(*found, session, batch.seen), batch, index)

        def send() -> None:
            sink = BatchForwarderSink(batch, index, send_by_slots)
            if forwarder.forward(sink, packed, protocol, is_of_states=True) == len(packed):
                self._stats.command_stats(command.name).uncount()
            else:
                send_by_slots()

        batch.set_retry(index, send)
        send()
        return True

    def target_of(self, key: bytes) -> tuple[int, int]:
        """Return the index of a key's cluster, and its slot."""
        if self._clusters.single is not None:
            return 0, slot_of(key)
        return self._clusters.index(self._clusters.of(key)), slot_of(key)

    def cluster_of(self, key: bytes) -> StateCluster:
        """Return the cluster of a key."""
        return self._clusters[self.target_of(key)[0]]

    def _clusters_with(self, job: bytes) -> Sequence[StateCluster]:
        """Return the cluster that has a job; the first one if none has it, as it replies the error."""
        if self._clusters.single is not None:
            return self._clusters
        found = self._clusters.with_job(job.decode("utf-8", "surrogateescape"))
        if len(found) > 1:
            name = job.decode("utf-8", "surrogateescape")
            raise GenericError(clash(found[0], name, found[1], name))
        return found or self._clusters[:1]

    def _query_jobs(self, command: Command, request: Request, session: Session, batch: ReplyBatch) -> bool:
        """Query all servers about their jobs; False if INFO needs no section of theirs."""
        clusters: Sequence[StateCluster] = self._clusters
        if command.policy.special is SpecialCommand.INFO:
            sections = server_sections(request[1:])
            if not sections:
                return False
            local = self._local.answer(CommandContext(session, self._server), command, request, perf_counter_ns())
            if isinstance(local, bytes) and local.startswith(b"-"):
                batch.add(b"" if session.replies_suppressed else local)
                return True
            jobs = JobQueries(clusters, session.protocol, batch.seen, within(session.user))
            batch.answer(partial(jobs.info, text_in(local), sections), session.replies_suppressed)
            self._stats.command_stats(command.name).uncount()  # `local` has counted it
            return True
        if command.policy.special is SpecialCommand.STATE_LIST:
            clusters = self._clusters_with(request[2])
        jobs = JobQueries(clusters, session.protocol, batch.seen, within(session.user))
        if command.policy.special is SpecialCommand.STATE_LIST:
            batch.answer(partial(jobs.states, request), session.replies_suppressed)
        elif command.policy.special is SpecialCommand.STATE_LAG:
            batch.answer(jobs.lags, session.replies_suppressed)
        else:
            batch.answer(jobs.jobs, session.replies_suppressed)
        return True

    def _with_address(self, replies: Sequence[RawReply], key: bytes) -> bytes:
        """Put the server's address into its reply to STATE LOCATE."""
        cluster = self._clusters.of(key)
        address = cluster.active_server(str(cluster.slots.owners[slot_of(key)]))
        return as_bytes(replies[0]).replace(encode(b"this server", 2), encode(address.encode(), 2))


def send_to(
    cluster: StateCluster,
    packed: bytes,
    slot: int,
    session: Session,
    batch: ReplyBatch,
    is_suppressed: bool = False,
    master: str | None = None,
) -> None:
    """Send a request to the owner of a slot, or to a master's shard; a batch gets its reply."""
    index = batch.expect(is_suppressed)
    request = ServerRequest(packed, slot, session.protocol, batch.deadline_s, batch, index, None, master)
    request.is_committed = session.reads_committed
    batch.set_retry(index, partial(cluster.send_again, request))
    cluster.send(request)
