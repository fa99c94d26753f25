"""The error reply to an exception of a request. Any exception fails one request only."""

from __future__ import annotations

from resp_server.pipeline.context import ServerContext
from resp_server.protocol.errors import ReplyError, reply_error_of
from state_backend.lmdb.damage import as_damage
from state_backend.model.errors import StoreError


def error_reply(server: ServerContext, error: Exception) -> bytes:
    """Return an encoded error reply, and count it. An unexpected exception is logged with an id."""
    reply_error = error if isinstance(error, ReplyError) else reply_error_for(server, error)
    server.stats.count_error(reply_error.code)
    return b"-%b\r\n" % reply_error.line


def reply_error_for(server: ServerContext, error: Exception) -> ReplyError:
    """Return the error for an exception: a `ReplyError` as it is, any other as an internal error with an id."""
    if isinstance(error, ReplyError):
        return error
    if (damage := as_damage(error)) is not None:
        error = damage
        server.keyspace.suspect_stores()
    if isinstance(error, StoreError):
        return reply_error_of(error, is_node=server.cluster is not None)
    return server.report(error)
