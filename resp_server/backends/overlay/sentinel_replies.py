"""Replies to SENTINEL at a proxy whose upstream is found by sentinels. They name the proxy itself as the master.

So clients that found the upstream by sentinels need one change: the proxy's address in place of the sentinels'.
"""

from __future__ import annotations

from resp_server.protocol.errors import GenericError, client_text
from resp_server.protocol.replies import Reply
from resp_server.protocol.request_parser import Request

NO_SUCH_MASTER = "No such master with that name"
# The proxy appears as the only sentinel.
QUORUM = b"1"


def sentinel_reply(request: Request, master: bytes, host: bytes, port: bytes) -> Reply:
    """Return the reply to a SENTINEL request. GenericError.

    Args:
        master: Its name.
        host, port: The proxy's address.
    """
    name = request[1].lower() if len(request) > 1 else b""
    if name == b"masters" and len(request) == 2:
        return [_master(master, host, port)]
    if len(request) == 3 and name == b"get-master-addr-by-name":
        return [host, port] if request[2] == master else None
    if len(request) == 3 and name in (b"master", b"sentinels", b"replicas", b"slaves"):
        if request[2] != master:
            raise GenericError(NO_SUCH_MASTER)
        return _master(master, host, port) if name == b"master" else []
    raise GenericError(f"the proxy does not answer SENTINEL '{client_text(name)}'; ask a sentinel")


def _master(name: bytes, host: bytes, port: bytes) -> Reply:
    return {
        b"name": name,
        b"ip": host,
        b"port": port,
        b"flags": b"master",
        b"num-slaves": b"0",
        b"num-other-sentinels": b"0",
        b"quorum": QUORUM,
    }
