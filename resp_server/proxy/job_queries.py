"""Queries about jobs, to all shards: STATE JOBS, LIST and LAG, and the sections of INFO about keys and jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import hiredis

from resp_server.forwarding.raw_replies import RawReply, as_bytes
from resp_server.forwarding.reply_splitter import pack
from resp_server.forwarding.reply_stages import MALFORMED_REPLY_ERRORS, ReplySink, ReplyStage, malformed_reply
from resp_server.protocol.replies import Verbatim, encode
from resp_server.protocol.request_parser import Request
from resp_server.proxy.job_merge import (
    Row,
    job_lines,
    keyspace_line,
    merged_jobs,
    merged_lags,
    merged_states,
    plain,
    rows_in,
    shares_of,
)
from resp_server.proxy.requests import ServerRequest
from resp_server.proxy.state_cluster import StateCluster
from resp_server.session.epoch_feed import ReplyEpochs
from state_backend.model.slot_set import NONE, SlotSet

JOBS, LAG = (b"STATE", b"JOBS"), (b"STATE", b"LAG")
KEYSPACE = (b"INFO", b"keyspace")

SERVER_SECTIONS = {"keyspace", "sparkis"}
# INFO section names that stand for several sections.
SECTION_GROUPS = {"default", "all", "everything"}


class ServerReplies(NamedTuple):
    """One server's replies, in the order of the requests."""

    address: str
    replies: Sequence[bytes]

    @property
    def error(self) -> bytes | None:
        """The first error among the replies."""
        return next((each for each in self.replies if each[:1] == b"-"), None)


class JobQuery(ReplyStage):
    """Sends the same requests to the active server of each shard. finish: merges all replies into one."""

    def __init__(
        self,
        clusters: Sequence[StateCluster],
        requests: Sequence[Request],
        finish: Callable[[Sequence[ServerReplies]], bytes],
        sink: ReplySink,
        index: int,
    ) -> None:
        super().__init__(sink, index)
        shards = [(cluster, master) for cluster in clusters for master in cluster.slots.counts]
        self._finish = finish
        self._count = len(requests)
        self._addresses = [cluster.active_server(master) for cluster, master in shards]
        self._replies: list[bytes] = [b""] * (len(shards) * len(requests))
        self._missing = len(self._replies)
        if not shards:
            self.finish(finish([]))
        for at, (cluster, master) in enumerate(shards):
            for number, request in enumerate(requests, at * len(requests)):
                cluster.send(ServerRequest(pack(request), 0, 2, cluster.deadline_s(), self, number, None, master))

    def receive(self, index: int, reply: RawReply, epochs: ReplyEpochs) -> None:
        """Store one reply; finish after the last one."""
        self._replies[index] = as_bytes(reply)
        self._missing -= 1
        if not self._missing:
            parts = [self._replies[at : at + self._count] for at in range(0, len(self._replies), self._count)]
            servers = [ServerReplies(*row) for row in zip(self._addresses, parts, strict=True)]
            try:
                self.finish(self._finish(servers))
            except MALFORMED_REPLY_ERRORS as error:
                self.finish(malformed_reply(error))


class JobQueries:
    """Queries about jobs for one client."""

    def __init__(
        self, clusters: Sequence[StateCluster], protocol: int, sink: ReplySink, index: int, within: Request = ()
    ) -> None:
        self._clusters = clusters
        self._within = within
        self._protocol = protocol
        self._sink, self._index = sink, index

    def jobs(self) -> None:
        """Query STATE JOBS. Servers that do not reply are listed in each job's error."""
        self._rows(JOBS, merged_jobs)

    def lags(self) -> None:
        """Query STATE LAG. Servers that do not reply are listed in each job's error."""
        self._rows(LAG, merged_lags)

    def states(self, request: Request) -> None:
        """Query STATE LIST. If a server does not reply, the result is an error, because its keys are not counted."""
        job = bytes(request[2]).decode("utf-8", "surrogateescape")

        def finish(servers: Sequence[ServerReplies]) -> bytes:
            available = [each for each in servers if each.error is None]
            if not available or len(available) < len(servers):
                return next((each.error for each in servers if each.error), b"-CLUSTERDOWN no server is known\r\n")
            shares = shares_of(_slots_of(rows_in(each.replies[0]), job) for each in available)
            states = merged_states([rows_in(each.replies[1]) for each in available], shares)
            return encode(plain(states), self._protocol)

        self._query([JOBS, request], finish)

    def info(self, own: str, sections: set[str]) -> None:
        """Query the servers' INFO sections, and append them to this proxy's own INFO text."""

        def finish(servers: Sequence[ServerReplies]) -> bytes:
            available = [each for each in servers if each.error is None]
            rows = [rows_in(each.replies[0]) for each in available]
            shares = shares_of(_slots_of_first(each) for each in rows)
            texts = [own] if own else []
            if "keyspace" in sections:
                found = [text_in(each.replies[1]) for each in available]
                texts.append(f"# Keyspace\r\n{keyspace_line(found, shares)}")
            if "sparkis" in sections:
                texts.append(f"# Sparkis\r\n{job_lines(merged_jobs(rows))}")
            return encode(Verbatim("\r\n".join(texts).encode()), self._protocol)

        self._query([JOBS, KEYSPACE], finish)

    def _rows(self, request: Request, merged: Callable[[Sequence[Sequence[Row]]], list[Row]]) -> None:
        def finish(servers: Sequence[ServerReplies]) -> bytes:
            failed = [each for each in servers if each.error is not None]
            available = [rows_in(each.replies[0]) for each in servers if each.error is None]
            if failed and not available:
                return failed[0].error or b""
            rows = merged(available)
            for row in rows if failed else []:
                names = ", ".join(each.address for each in failed)
                row["error"] = "; ".join(filter(None, (row["error"], f"no reply from {names}")))
            return encode(plain(rows), self._protocol)

        self._query([request], finish)

    def _query(self, requests: Sequence[Request], finish: Callable[[Sequence[ServerReplies]], bytes]) -> None:
        JobQuery(self._clusters, [(*self._within, *each) for each in requests], finish, self._sink, self._index)


def server_sections(names: Sequence[bytes]) -> set[str]:
    """Return the requested INFO sections that state servers render."""
    sections = {name.decode("utf-8", "replace").lower() for name in names}
    return SERVER_SECTIONS & sections if sections and not sections & SECTION_GROUPS else set(SERVER_SECTIONS)


def _slots_of(rows: Sequence[Row], job: str) -> SlotSet:
    return next((SlotSet.parse(row["slots"]) for row in rows if row["name"] == job), NONE)


def _slots_of_first(rows: Sequence[Row]) -> SlotSet:
    """Return the slots that a server owns of its first job. Nearly always it owns the same slots of its other jobs."""
    return SlotSet.parse(rows[0]["slots"]) if rows else NONE


def text_in(reply: object) -> str:
    """Return the text of a bulk or verbatim string; empty for any other reply."""
    assert isinstance(reply, bytes)
    reader = hiredis.Reader(encoding="utf-8")
    reader.feed(reply)
    found = reader.gets()
    return found.removeprefix("txt:") if isinstance(found, str) else ""
