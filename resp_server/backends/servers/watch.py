"""WATCH of keys of state servers: each owner returns the version of its key, and EXEC sends it back."""

from __future__ import annotations

from collections.abc import Sequence

from resp_server.backends.servers.requests import ServerRequest
from resp_server.backends.servers.state_cluster import StateCluster
from resp_server.raw_replies.answers import Answer, ReplyFuture
from resp_server.raw_replies.raw_reply import as_bytes, is_error
from resp_server.raw_replies.reply_sinks import MALFORMED_REPLY_ERRORS, malformed_reply
from resp_server.raw_replies.reply_splitter import pack
from resp_server.session.transaction import WatchedVersion
from state_backend.model.slots import slot_of


async def watch_states(
    watched: dict[tuple[int, bytes], WatchedVersion], targets: Sequence[tuple[StateCluster, bytes]]
) -> Answer:
    """Request a mark of each key from its owner, and store it in `watched`; answer a WATCH."""
    marks = []
    for cluster, key in targets:
        future = ReplyFuture()
        cluster.send(ServerRequest(pack((b"STATE", b"MARK", key)), slot_of(key), 2, cluster.deadline_s(), future, 0))
        marks.append((key, future))
    error = None
    for key, future in marks:
        mark = as_bytes((await future).reply)
        try:
            if is_error(mark):
                error = error or mark
            else:
                watched[0, key] = WatchedVersion.parse(mark.partition(b"\r\n")[2][:-2])
        except MALFORMED_REPLY_ERRORS as malformed:
            error = error or malformed_reply(malformed)
    return Answer(error or b"+OK\r\n")
