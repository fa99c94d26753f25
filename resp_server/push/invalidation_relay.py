"""Invalidations for a client of another process of this server, which others redirect to."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from resp_server.push.clients import Clients
from resp_server.session.session import RESP2, Session
from resp_server.session.tracking import MESSAGE, PUSH, Invalidation

RELAY = "send invalidations to a client"


def frames_for(target: Session, invalidations: Sequence[Invalidation]) -> bytes:
    """Return the frames for a redirect target; none for a client of RESP2 without subscriptions."""
    if target.protocol == RESP2 and target.subscriptions is None:
        return b""
    prefix = MESSAGE if target.protocol == RESP2 else PUSH
    return b"".join([invalidation.frames(prefix) for invalidation in invalidations])


def relayed(sessions: Mapping[int, Session], clients: Clients, argument: Mapping[str, Any]) -> bool:
    """Send another process's invalidations to a client of this process; False if the client is not here."""
    target = sessions.get(argument["id"])
    if target is None:
        return False
    frames = frames_for(target, [_invalidation_of_json(each) for each in argument["invalidations"]])
    if frames:
        clients.push(target.id, frames)
    return True


def invalidation_to_json(invalidation: Invalidation) -> dict[str, Any]:
    """Return an invalidation in the form that other processes get."""
    keys = None if invalidation.keys is None else [b64encode(key).decode() for key in invalidation.keys]
    return {"keys": keys, "is_one_frame": invalidation.is_one_frame}


def _invalidation_of_json(row: Mapping[str, Any]) -> Invalidation:
    keys = None if row["keys"] is None else [b64decode(key) for key in row["keys"]]
    return Invalidation(keys, is_one_frame=row["is_one_frame"])
