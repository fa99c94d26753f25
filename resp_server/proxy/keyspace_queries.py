"""Queries about all keys: DBSIZE, KEYS and RANDOMKEY are sent to all shards, SCAN to the shard of its cursor's slot.

A reply is used only if its server had the proxy's topology version before and after the query. Otherwise keys of a
moving slot could be counted twice, or not at all. The query is sent again until the servers have the same version, or
until its deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from resp_server.command.ours import role_of
from resp_server.command.policy import Role
from resp_server.commands.generic import cursor
from resp_server.forwarding.raw_replies import RawReply, as_bytes, is_error
from resp_server.forwarding.reply_splitter import pack
from resp_server.forwarding.reply_stages import Merge, ReplySink, ReplyStage, merge_or_error
from resp_server.protocol.errors import ClusterDownError, ReplyError, TryAgainError
from resp_server.protocol.request_parser import Request
from resp_server.proxy.applications import Applications
from resp_server.proxy.request_policy import POSITION_BITS, merge_all, scan_reply_up_to_slot
from resp_server.proxy.requests import ServerRequest
from resp_server.proxy.state_cluster import StateCluster
from resp_server.session.epoch_feed import NO_EPOCHS, ReplyEpochs, union_of
from state_backend.model.slots import HASH_BITS, SLOTS

TOPOLOGY = pack((b"CLUSTER", b"INFO"))
# A request for the server's topology version, the query, and the request for the version again.
REQUESTS_PER_SHARD = 3


class QueriedShard(NamedTuple):
    """A shard that is queried. version: of the topology; slots: the number of its slots."""

    cluster: StateCluster
    master: str
    version: int
    slots: int


class KeyspaceQuery(ReplyStage):
    """One query."""

    def __init__(
        self,
        applications: Applications,
        request: Request,
        protocol: int,
        sink: ReplySink,
        index: int,
        within: Request = (),
    ) -> None:
        super().__init__(sink, index)
        self._within = within
        self._applications = applications.each
        self._role = role_of(request[0])
        self._request = tuple(request)
        self._protocol = protocol
        self._is_scan = self._role is Role.SCAN
        first = applications.each[0]
        self._deadline_s = first.deadline_s(not self._is_scan)
        # Servers that have different versions for as long as a short request's deadline will not agree soon.
        self._agree_s = first.deadline_s()
        if self._is_scan:
            self._number, self._cursor = self._split_cursor(bytes(request[1]))

    def _split_cursor(self, word: bytes) -> tuple[int, int]:
        """Split a cursor into the number of its application and the cursor for that application's servers."""
        if len(self._applications) == 1 or not word.isdigit():
            return 0, cursor(word)
        number, position = divmod(int(word), 1 << POSITION_BITS)
        if number < len(self._applications):
            return number, position
        return len(self._applications) - 1, cursor(word)  # after the last application

    def send(self) -> None:
        """Send the query to its servers."""
        self.reopen()
        self.attempt(self._send)

    def _send(self) -> None:
        queried = self._applications
        if self._is_scan:
            queried = queried[self._number : self._number + 1]
        if not all(each.slots.is_complete for each in queried):
            self._fail(ClusterDownError())
            return
        request = self._request
        if self._is_scan:
            request = (request[0], b"%d" % self._cursor, *request[2:])
            slots = queried[0].slots
            at = min(self._cursor >> HASH_BITS, SLOTS - 1)
            self._last = slots.last_of_run(at)
            self._shards = [QueriedShard(queried[0], str(slots.owners_of_version[at]), slots.version, 0)]
        else:
            self._shards = [
                QueriedShard(each, master, each.slots.version, count)
                for each in queried
                for master, count in each.slots.counts.items()
            ]
        packed = pack((*self._within, *request))
        self._epochs = NO_EPOCHS
        self._replies: list[RawReply | None] = [None] * (REQUESTS_PER_SHARD * len(self._shards))
        self._missing = len(self._replies)
        for number, (cluster, master, _, _) in enumerate(self._shards):
            for index, each in enumerate((TOPOLOGY, packed, TOPOLOGY), REQUESTS_PER_SHARD * number):
                sent = ServerRequest(
                    each, 0, self._protocol, self._deadline_s, self, index, None, master, not self._is_scan
                )
                cluster.send(sent)

    def receive(self, index: int, reply: RawReply, epochs: ReplyEpochs) -> None:
        """Store one reply; after the last one, check the versions and merge the replies."""
        self._replies[index] = reply
        self._epochs = union_of(self._epochs, epochs)
        self._missing -= 1
        if not self._missing:
            self._done([each for each in self._replies if each is not None])

    def _done(self, replies: Sequence[RawReply]) -> None:
        error = next(filter(is_error, replies), None)
        if error is not None:
            self.finish(error, self._epochs)
            return
        unequal = [
            shard
            for shard, (before, _, after) in zip(
                self._shards, zip(*[iter(replies)] * REQUESTS_PER_SHARD, strict=True), strict=True
            )
            if any(
                b"\r\ncluster_current_epoch:%d\r\n" % shard.version not in as_bytes(each) for each in (before, after)
            )
        ]
        if unequal or any(shard.version != shard.cluster.slots.version for shard in self._shards):
            for shard in unequal:
                shard.cluster.refresh(shard.cluster.active_server(shard.master))
            if not self._shards[0].cluster.retry_later(self._agree_s, lambda: self.attempt(self._send)):
                self._fail(TryAgainError("the servers do not have the same version of the topology"))
        elif self._is_scan:
            count = len(self._applications)
            self._merge(
                lambda replies: scan_reply_up_to_slot(as_bytes(replies[0]), self._last, self._number, count),
                replies[1:2],
            )
        else:
            weights = [shard.slots for shard in self._shards]
            self._merge(lambda replies: merge_all(self._role, replies, weights), replies[1::REQUESTS_PER_SHARD])

    def _merge(self, merge: Merge, replies: Sequence[RawReply]) -> None:
        defer = self._shards[0].cluster.defer
        self.run_steps(merge_or_error(merge, replies), lambda reply: self.finish(reply, self._epochs), defer)

    def _fail(self, error: ReplyError) -> None:
        self.finish(b"-%b\r\n" % error.line)
