"""Queries about jobs, to all shards: STATE JOBS, LIST and LAG, and the sections of INFO about keys and jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import hiredis

from resp_server.backends.servers.job_merge import (
    job_lines,
    keyspace_line,
    merged_jobs,
    merged_lags,
    merged_states,
    rows_in,
)
from resp_server.backends.servers.requests import ServerRequest
from resp_server.backends.servers.state_cluster import StateCluster
from resp_server.commands.fact_merges import Row, shares_of
from resp_server.commands.job_facts import reply_of
from resp_server.protocol.replies import Verbatim, encode
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.answers import Answer, ReadSeenEpochs, ReplyFuture, all_of
from resp_server.raw_replies.raw_reply import as_bytes
from resp_server.raw_replies.reply_sinks import MALFORMED_REPLY_ERRORS, malformed_reply
from resp_server.raw_replies.reply_splitter import pack
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
        return next((reply for reply in self.replies if reply[:1] == b"-"), None)


# Merges all servers' replies into one.
MergeServers = Callable[[Sequence[ServerReplies]], bytes]


class JobQueries:
    """Queries about jobs for one client.

    Args:
        within: The words of STATE WITHIN, which limit the keys; empty: no limit.
    """

    def __init__(
        self, clusters: Sequence[StateCluster], protocol: int, seen: ReadSeenEpochs, within: Request = ()
    ) -> None:
        self._clusters, self._protocol, self._seen, self._within = clusters, protocol, seen, within

    async def jobs(self) -> Answer:
        """Answer STATE JOBS. Servers that do not reply are listed in each job's error."""
        return await self._rows(JOBS, merged_jobs)

    async def lags(self) -> Answer:
        """Answer STATE LAG. Servers that do not reply are listed in each job's error."""
        return await self._rows(LAG, merged_lags)

    async def states(self, request: Request) -> Answer:
        """Answer STATE LIST. If a server does not reply, the answer is an error, because its keys are not counted."""
        job = bytes(request[2]).decode("utf-8", "surrogateescape")

        def merge(servers: Sequence[ServerReplies]) -> bytes:
            available = [server for server in servers if server.error is None]
            if not available or len(available) < len(servers):
                return next((each.error for each in servers if each.error), b"-CLUSTERDOWN no server is known\r\n")
            shares = shares_of(_slots_of(rows_in(each.replies[0]), job) for each in available)
            states = merged_states([rows_in(each.replies[1]) for each in available], shares)
            return encode(reply_of(states), self._protocol)

        return await self._query([JOBS, request], merge)

    async def info(self, local: str, sections: set[str]) -> Answer:
        """Answer INFO by this proxy's text and the servers' sections."""

        def merge(servers: Sequence[ServerReplies]) -> bytes:
            available = [server for server in servers if server.error is None]
            rows = [rows_in(each.replies[0]) for each in available]
            shares = shares_of(_slots_of_first(row) for row in rows)
            texts = [local] if local else []
            if "keyspace" in sections:
                found = [text_in(each.replies[1]) for each in available]
                texts.append(f"# Keyspace\r\n{keyspace_line(found, shares)}")
            if "sparkis" in sections:
                texts.append(f"# Sparkis\r\n{job_lines(merged_jobs(rows))}")
            return encode(Verbatim("\r\n".join(texts).encode()), self._protocol)

        return await self._query([JOBS, KEYSPACE], merge)

    async def _rows(self, request: Request, merged: Callable[[Sequence[Sequence[Row]]], list[Row]]) -> Answer:
        def merge(servers: Sequence[ServerReplies]) -> bytes:
            failed = [server for server in servers if server.error is not None]
            available = [rows_in(server.replies[0]) for server in servers if server.error is None]
            if failed and not available:
                return failed[0].error or b""
            rows = merged(available)
            for row in rows if failed else []:
                names = ", ".join(each.address for each in failed)
                row["error"] = "; ".join(filter(None, (row["error"], f"no reply from {names}")))
            return encode(reply_of(rows), self._protocol)

        return await self._query([request], merge)

    async def _query(self, requests: Sequence[Request], merge: MergeServers) -> Answer:
        """Send the same requests to the active server of each shard, and merge all replies."""
        packed = [pack((*self._within, *request)) for request in requests]
        shards = [(cluster, master) for cluster in self._clusters for master in cluster.slots.counts]
        addresses = [cluster.active_server(master) for cluster, master in shards]
        answers = await all_of([self._ask(*shard, each) for shard in shards for each in packed])
        replies = iter([as_bytes(answer.reply) for answer in answers])
        try:
            return Answer(merge([ServerReplies(address, list(islice(replies, len(packed)))) for address in addresses]))
        except MALFORMED_REPLY_ERRORS as error:
            return Answer(malformed_reply(error))

    def _ask(self, cluster: StateCluster, master: str, packed: bytes) -> ReplyFuture:
        future = ReplyFuture(self._seen)
        cluster.send(ServerRequest(packed, 0, 2, cluster.deadline_s(), future, 0, None, master))
        return future


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
