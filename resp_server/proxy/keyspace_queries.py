"""Queries about the keys of several servers: DBSIZE, KEYS and RANDOMKEY of all of them, SCAN of the cursor's server.

A reply counts only if each server has the proxy's version of the topology before and after it. Otherwise keys of a
moving slot could be counted twice, or not at all. Until the servers agree, the query is sent again, up to its deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from resp_server.commands.generic import cursor
from resp_server.protocol.errors import ClusterDownError, ReplyError, TryAgainError
from resp_server.protocol.request_parser import Request
from resp_server.proxy.applications import Applications
from resp_server.proxy.epoch_floors import together
from resp_server.proxy.raw_replies import RawReply, as_bytes, is_error
from resp_server.proxy.reply_splitter import pack
from resp_server.proxy.request_policy import POSITION_BITS, merge_all, scan_reply
from resp_server.proxy.requests import Merge, ReplySink, ReplyStage, UpstreamRequest, merge_or_error
from resp_server.proxy.upstream_cluster import UpstreamCluster
from resp_server.session.epoch_feed import NO_EPOCHS, ReplyEpochs
from state_backend.model.slots import HASH_BITS, SLOTS

TOPOLOGY = pack((b"CLUSTER", b"INFO"))
# Requests per server: the query, between two requests for the server's topology version.
ASKS = 3


class Place(NamedTuple):
    """A shard that is queried, by its master."""

    cluster: UpstreamCluster
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
        self._name = request[0].lower().decode("latin-1")
        self._request = tuple(request)
        self._protocol = protocol
        self._is_scan = self._name == "scan"
        first = applications.each[0]
        self._deadline_s = first.deadline_s(not self._is_scan)
        # Servers that do not agree within a short request's deadline will not agree soon.
        self._agree_s = first.deadline_s()
        if self._is_scan:
            self._number, self._cursor = self._place_of(bytes(request[1]))

    def _place_of(self, word: bytes) -> tuple[int, int]:
        """Split a cursor into the number of its application and the cursor for that application's servers."""
        if len(self._applications) == 1 or not word.isdigit():
            return 0, cursor(word)
        number, position = divmod(int(word), 1 << POSITION_BITS)
        if number < len(self._applications):
            return number, position
        return len(self._applications) - 1, cursor(word)  # behind the end

    def ask(self) -> None:
        """Send the query to all servers concerned."""
        self.reopen()
        self.attempt(self._ask)

    def _ask(self) -> None:
        asked = self._applications
        if self._is_scan:
            asked = asked[self._number : self._number + 1]
        if not all(each.slots.is_whole for each in asked):
            self._end(ClusterDownError())
            return
        request = self._request
        if self._is_scan:
            request = (request[0], b"%d" % self._cursor, *request[2:])
            slots = asked[0].slots
            at = min(self._cursor >> HASH_BITS, SLOTS - 1)
            self._last = slots.last_of_run(at)
            self._places = [Place(asked[0], str(slots.owners_of_version[at]), slots.version, 0)]
        else:
            self._places = [
                Place(each, master, each.slots.version, count)
                for each in asked
                for master, count in each.slots.counts.items()
            ]
        packed = pack((*self._within, *request))
        self._epochs = NO_EPOCHS
        self._replies: list[RawReply | None] = [None] * (ASKS * len(self._places))
        self._missing = len(self._replies)
        for at, (cluster, master, _, _) in enumerate(self._places):
            for place, each in enumerate((TOPOLOGY, packed, TOPOLOGY), ASKS * at):
                ask = UpstreamRequest(
                    each, 0, self._protocol, self._deadline_s, self, place, None, master, not self._is_scan
                )
                cluster.send(ask)

    def receive(self, index: int, reply: RawReply, epochs: ReplyEpochs) -> None:
        """Store one reply; evaluate them after the last one."""
        self._replies[index] = reply
        self._epochs = together(self._epochs, epochs)
        self._missing -= 1
        if not self._missing:
            self._done([each for each in self._replies if each is not None])

    def _done(self, replies: Sequence[RawReply]) -> None:
        error = next(filter(is_error, replies), None)
        if error is not None:
            self.finish(error, self._epochs)
            return
        others = [
            place
            for place, (before, _, after) in zip(self._places, zip(*[iter(replies)] * ASKS, strict=True), strict=True)
            if any(
                b"\r\ncluster_current_epoch:%d\r\n" % place.version not in as_bytes(each) for each in (before, after)
            )
        ]
        if others or any(place.version != place.cluster.slots.version for place in self._places):
            for place in others:
                place.cluster.refresh(place.cluster.active_server(place.master))
            if not self._places[0].cluster.later(self._agree_s, lambda: self.attempt(self._ask)):
                self._end(TryAgainError("the servers do not show the same version of the topology"))
        elif self._is_scan:
            count = len(self._applications)
            self._make(lambda answers: scan_reply(as_bytes(answers[0]), self._last, self._number, count), replies[1:2])
        else:
            weights = [place.slots for place in self._places]
            self._make(lambda answers: merge_all(self._name, answers, weights), replies[1::ASKS])

    def _make(self, merge: Merge, answers: Sequence[RawReply]) -> None:
        defer = self._places[0].cluster.defer
        self.run_steps(merge_or_error(merge, answers), lambda reply: self.finish(reply, self._epochs), defer)

    def _end(self, error: ReplyError) -> None:
        self.finish(b"-%b\r\n" % error.line)
