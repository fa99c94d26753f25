"""Reads histories of keys for one server, which starts it (see `pipeline.histories`). It ends when stdin closes.

python -m resp_server.programs.history_reader
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from resp_server.pipeline.histories import HISTORY_S_MAX, REPLY_BYTES_MAX
from resp_server.protocol.errors import internal_error
from resp_server.protocol.replies import Pairs, Reply, ReplySet, encode
from state_backend import log_lines
from state_backend.history.key_history import Version, history_of
from state_backend.log.change_log import ChangeLog
from state_backend.log.time_travel import AsOf, moment_of
from state_backend.model.clock import iso_text
from state_backend.model.descriptor import Kind
from state_backend.model.errors import LogError, SparkisError

# Servers and appliers of this machine get the processor first.
NICENESS = 10


def answer(request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Return the header and the encoded reply to a request."""
    try:
        reply = encode([_row(version) for version in _versions(request)], request["protocol"])
    except SparkisError as error:
        return {"error": str(error)}, b""
    except Exception as error:
        return {"error": internal_error(error).text}, b""
    if len(reply) > REPLY_BYTES_MAX:
        return {"error": f"the value alone has {len(reply)} bytes, more than {REPLY_BYTES_MAX}"}, b""
    return {"bytes": len(reply)}, reply


def _versions(request: dict[str, Any]) -> Sequence[Version]:
    log = ChangeLog(request["log"]).job(request["job"])
    moment = moment_of(log, AsOf(request["epoch"]))
    if moment.generation != request["generation"]:
        raise LogError(f"job {log.job!r}: its state was replaced a moment ago; retry")
    return history_of(log, request["key"].encode("latin-1"), request["count"], moment)


def _row(version: Version) -> Reply:
    return {
        b"epoch": version.epoch,
        b"committed_at": iso_text(version.clock_ms).encode(),
        b"kind": None if version.kind is None else version.kind.encode(),
        b"value": _value(version),
        b"is_oldest": int(version.is_oldest),
    }


def _value(version: Version) -> Reply:
    """Return a value as the command that returns all of it does: GET, HGETALL, LRANGE, SMEMBERS, ZRANGE WITHSCORES."""
    value: Any = version.value
    match version.kind:
        case Kind.SET:
            return ReplySet(value)
        case Kind.SORTED_SET:
            return Pairs(value)
    return value


def main() -> None:
    """Answer one request after another, until the input ends."""
    log_lines.set_up_child()
    for number in (signal.SIGINT, signal.SIGHUP):  # only the server ends this process
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    for line in sys.stdin.buffer:
        signal.alarm(2 * int(HISTORY_S_MAX))  # ends this process if the server is gone and cannot end it
        request = json.loads(line)
        if request["lines"] != log_lines.inherited():
            log_lines.set_up_as(request["lines"])
        header, reply = answer(request)
        signal.alarm(0)
        sys.stdout.buffer.write(json.dumps(header).encode() + b"\n" + reply)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
