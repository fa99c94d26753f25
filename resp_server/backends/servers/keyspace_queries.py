"""Queries about all keys: DBSIZE, KEYS and RANDOMKEY are sent to all shards, SCAN to the shard of its cursor's slot.

A reply is used only if its server had the proxy's topology version before and after the query. Otherwise keys of a
moving slot could be counted twice, or not at all. The query is sent again until the servers have the same version, or
until its deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from resp_server.backends.servers.request_split import POSITION_BITS, merge_all, scan_reply_up_to_slot
from resp_server.backends.servers.requests import ServerRequest
from resp_server.backends.servers.state_cluster import StateCluster
from resp_server.backends.servers.state_clusters import StateClusters
from resp_server.command.policies import special_of
from resp_server.command.policy import SpecialCommand
from resp_server.commands.generic import cursor
from resp_server.protocol.errors import ClusterDownError, ReplyError, TryAgainError
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.answers import Answer, ReadSeenEpochs, Replies, merge_replies
from resp_server.raw_replies.raw_reply import RawReply, as_bytes, is_error
from resp_server.raw_replies.reply_sinks import Merge
from resp_server.raw_replies.reply_splitter import pack
from state_backend.model.slots import HASH_BITS, SLOTS

TOPOLOGY = pack((b"CLUSTER", b"INFO"))
# A request for the server's topology version, the query, and the request for the version again.
REQUESTS_PER_SHARD = 3


class QueriedShard(NamedTuple):
    """A shard that is queried."""

    cluster: StateCluster
    master: str
    version: int
    slots: int


class KeyspaceQuery:
    """A client's query."""

    def __init__(
        self, clusters: StateClusters, request: Request, protocol: int, seen: ReadSeenEpochs, within: Request = ()
    ) -> None:
        self._clusters, self._protocol, self._seen = clusters, protocol, seen
        self._special = special_of(request[0])
        self._is_scan = self._special is SpecialCommand.SCAN
        first = self._clusters[0]
        self._deadline_s = first.deadline_s(not self._is_scan)
        # Servers that have different versions for as long as a short request's deadline will not agree soon.
        self._agree_s = first.deadline_s()
        if self._is_scan:
            self._number, inner = self._split_cursor(bytes(request[1]))
            self._slot = min(inner >> HASH_BITS, SLOTS - 1)
            request = (request[0], b"%d" % inner, *request[2:])
        self._packed = pack((*within, *request))

    def _split_cursor(self, argument: bytes) -> tuple[int, int]:
        """Split a cursor into the index of its cluster and the cursor for the servers of that cluster."""
        if len(self._clusters) == 1 or not argument.isdigit():
            return 0, cursor(argument)
        number, position = divmod(int(argument), 1 << POSITION_BITS)
        if number < len(self._clusters):
            return number, position
        return len(self._clusters) - 1, cursor(argument)  # after the last cluster

    async def answer(self) -> Answer:
        """Answer the query, by servers that have the proxy's version of the topology."""
        is_long = not self._is_scan
        queried = self._clusters[self._number : self._number + 1] if self._is_scan else self._clusters
        while True:
            if not all(each.slots.is_complete for each in queried):
                return _refused(ClusterDownError())
            shards = [self._scanned(queried[0])] if self._is_scan else _shards_of(queried)
            requests = [(shard, each) for shard in shards for each in (TOPOLOGY, self._packed, TOPOLOGY)]
            sent = Replies(self._seen, len(requests))
            for index, (shard, packed) in enumerate(requests):
                shard.cluster.send(
                    ServerRequest(packed, 0, self._protocol, self._deadline_s, sent, index, None, shard.master, is_long)
                )
            replies = await sent
            error = next(filter(is_error, replies), None)
            if error is not None:
                return Answer(error, sent.epochs)
            unequal = _with_other_versions(shards, replies)
            if not unequal and all(shard.version == shard.cluster.slots.version for shard in shards):
                defer = shards[0].cluster.defer
                return Answer(
                    await merge_replies(self._merge_of(shards), replies[1::REQUESTS_PER_SHARD], defer), sent.epochs
                )
            for shard in unequal:
                shard.cluster.refresh(shard.cluster.active_server(shard.master))
            if not await shards[0].cluster.pause(self._agree_s):
                return _refused(TryAgainError("the servers do not have the same version of the topology"))

    def _scanned(self, cluster: StateCluster) -> QueriedShard:
        """Return the shard of the cursor's slot."""
        return QueriedShard(cluster, str(cluster.slots.owners_of_version[self._slot]), cluster.slots.version, 0)

    def _merge_of(self, shards: Sequence[QueriedShard]) -> Merge:
        """Return the function that merges the shards' replies to the query."""
        if not self._is_scan:
            return lambda replies: merge_all(self._special, replies, [shard.slots for shard in shards])
        last_slot = shards[0].cluster.slots.last_of_run(self._slot)
        return lambda replies: scan_reply_up_to_slot(as_bytes(replies[0]), last_slot, self._number, len(self._clusters))


def _refused(error: ReplyError) -> Answer:
    return Answer(b"-%b\r\n" % error.line)


def _shards_of(clusters: Sequence[StateCluster]) -> Sequence[QueriedShard]:
    return [
        QueriedShard(each, master, each.slots.version, count)
        for each in clusters
        for master, count in each.slots.counts.items()
    ]


def _with_other_versions(shards: Sequence[QueriedShard], replies: Sequence[RawReply]) -> Sequence[QueriedShard]:
    """Return the shards whose servers had another version of the topology, before or after the query."""
    return [
        shard
        for shard, before, after in zip(
            shards, replies[::REQUESTS_PER_SHARD], replies[REQUESTS_PER_SHARD - 1 :: REQUESTS_PER_SHARD], strict=True
        )
        if any(b"\r\ncluster_current_epoch:%d\r\n" % shard.version not in as_bytes(each) for each in (before, after))
    ]
