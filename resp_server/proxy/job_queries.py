"""Queries about jobs to all shards: STATE JOBS, LIST and LAG, and the sections of INFO about keys and jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import hiredis

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
from resp_server.proxy.raw_replies import RawReply, as_bytes
from resp_server.proxy.reply_splitter import pack
from resp_server.proxy.requests import MALFORMED_REPLY_ERRORS, ReplySink, ReplyStage, UpstreamRequest, malformed_reply
from resp_server.proxy.upstream_cluster import UpstreamCluster
from resp_server.session.epoch_feed import ReplyEpochs
from state_backend.model.key_groups import NONE, KeyGroups

JOBS, LAG = (b"STATE", b"JOBS"), (b"STATE", b"LAG")
KEYSPACE = (b"INFO", b"keyspace")

OF_SERVERS = {"keyspace", "sparkis"}
# INFO section names that stand for several sections.
SEVERAL = {"default", "all", "everything"}


class ServerReplies(NamedTuple):
    """One server's replies, in the order of the requests."""

    address: str
    replies: Sequence[bytes]

    @property
    def error(self) -> bytes | None:
        """The first error among the replies."""
        return next((each for each in self.replies if each[:1] == b"-"), None)


class JobQuery(ReplyStage):
    """Sends the same requests to the active server of each shard. finish: makes one reply of all replies."""

    def __init__(
        self,
        asked: Sequence[UpstreamCluster],
        requests: Sequence[Request],
        finish: Callable[[Sequence[ServerReplies]], bytes],
        sink: ReplySink,
        index: int,
    ) -> None:
        super().__init__(sink, index)
        places = [(cluster, master) for cluster in asked for master in cluster.slots.counts]
        self._finish = finish
        self._count = len(requests)
        self._addresses = [cluster.active_server(master) for cluster, master in places]
        self._replies: list[bytes] = [b""] * (len(places) * len(requests))
        self._missing = len(self._replies)
        if not places:
            self.finish(finish([]))
        for at, (cluster, master) in enumerate(places):
            for number, request in enumerate(requests, at * len(requests)):
                cluster.send(UpstreamRequest(pack(request), 0, 2, cluster.deadline_s(), self, number, None, master))

    def receive(self, index: int, reply: RawReply, answered: ReplyEpochs) -> None:
        """Store one reply; finish after the last one."""
        self._replies[index] = as_bytes(reply)
        self._missing -= 1
        if not self._missing:
            parts = [self._replies[at : at + self._count] for at in range(0, len(self._replies), self._count)]
            answers = [ServerReplies(*row) for row in zip(self._addresses, parts, strict=True)]
            try:
                self.finish(self._finish(answers))
            except MALFORMED_REPLY_ERRORS as error:
                self.finish(malformed_reply(error))


class JobQueries:
    """Queries about jobs for one client."""

    def __init__(
        self, asked: Sequence[UpstreamCluster], protocol: int, sink: ReplySink, index: int, within: Request = ()
    ) -> None:
        self._asked = asked
        self._within = within
        self._protocol = protocol
        self._sink, self._index = sink, index

    def jobs(self) -> None:
        """Query STATE JOBS. Servers that do not answer are listed in each job's error."""
        self._rows(JOBS, merged_jobs)

    def lags(self) -> None:
        """Query STATE LAG. Servers that do not answer are listed in each job's error."""
        self._rows(LAG, merged_lags)

    def states(self, request: Request) -> None:
        """Query STATE LIST. If a server does not answer, the reply is an error, as its keys would be missing."""
        job = bytes(request[2]).decode("utf-8", "surrogateescape")

        def finish(answers: Sequence[ServerReplies]) -> bytes:
            answered = [each for each in answers if each.error is None]
            if not answered or len(answered) < len(answers):
                return next((each.error for each in answers if each.error), b"-CLUSTERDOWN no server is known\r\n")
            shares = shares_of(_held(rows_in(each.replies[0]), job) for each in answered)
            states = merged_states([rows_in(each.replies[1]) for each in answered], shares)
            return encode(plain(states), self._protocol)

        self._gather([JOBS, request], finish)

    def info(self, own: str, wanted: set[str]) -> None:
        """Query the servers' INFO sections, and append them to this proxy's own INFO text."""

        def finish(answers: Sequence[ServerReplies]) -> bytes:
            answered = [each for each in answers if each.error is None]
            rows = [rows_in(each.replies[0]) for each in answered]
            shares = shares_of(_held_of_first(each) for each in rows)
            texts = [own] if own else []
            if "keyspace" in wanted:
                found = [text_in(each.replies[1]) for each in answered]
                texts.append(f"# Keyspace\r\n{keyspace_line(found, shares)}")
            if "sparkis" in wanted:
                texts.append(f"# Sparkis\r\n{job_lines(merged_jobs(rows))}")
            return encode(Verbatim("\r\n".join(texts).encode()), self._protocol)

        self._gather([JOBS, KEYSPACE], finish)

    def _rows(self, request: Request, merged: Callable[[Sequence[Sequence[Row]]], list[Row]]) -> None:
        def finish(answers: Sequence[ServerReplies]) -> bytes:
            failed = [each for each in answers if each.error is not None]
            answered = [rows_in(each.replies[0]) for each in answers if each.error is None]
            if failed and not answered:
                return failed[0].error or b""
            rows = merged(answered)
            for row in rows if failed else []:
                names = ", ".join(each.address for each in failed)
                row["error"] = "; ".join(filter(None, (row["error"], f"not told by {names}")))
            return encode(plain(rows), self._protocol)

        self._gather([request], finish)

    def _gather(self, requests: Sequence[Request], finish: Callable[[Sequence[ServerReplies]], bytes]) -> None:
        JobQuery(self._asked, [(*self._within, *each) for each in requests], finish, self._sink, self._index)


def server_sections(names: Sequence[bytes]) -> set[str]:
    """Return the requested INFO sections that servers render."""
    wanted = {name.decode("utf-8", "replace").lower() for name in names}
    return OF_SERVERS & wanted if wanted and not wanted & SEVERAL else set(OF_SERVERS)


def _held(rows: Sequence[Row], job: str) -> KeyGroups:
    return next((KeyGroups.parse(row["slots"]) for row in rows if row["name"] == job), NONE)


def _held_of_first(rows: Sequence[Row]) -> KeyGroups:
    """Return the slots that a server owns of its first job; nearly always it owns the same slots of all jobs."""
    return KeyGroups.parse(rows[0]["slots"]) if rows else NONE


def text_in(reply: object) -> str:
    """Return the text of a bulk or verbatim string; empty for any other reply."""
    assert isinstance(reply, bytes)
    reader = hiredis.Reader(encoding="utf-8")
    reader.feed(reply)
    found = reader.gets()
    return found.removeprefix("txt:") if isinstance(found, str) else ""
