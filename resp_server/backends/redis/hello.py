"""Parses an upstream's reply to HELLO: its version, role and modules. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import hiredis

from resp_server.protocol.replies import Reply

# The fields that a proxy shows its clients. The others are about one connection.
FIELDS = (b"server", b"version", b"role", b"modules")


def hello_fields(reply: bytes) -> Mapping[bytes, Reply]:
    """Return the fields that clients of a proxy see as well; none if the upstream does not know HELLO. ValueError."""
    reader = hiredis.Reader(notEnoughData=None)
    reader.feed(reply)
    found = reader.gets()
    if isinstance(found, hiredis.ReplyError):
        return {}  # Redis before 6, or a user without the right to HELLO
    if not isinstance(found, list):
        raise ValueError(f"it is no map: {str(found)[:200]}")
    fields = dict(zip(found[::2], found[1::2], strict=True))
    fields[b"modules"] = [dict(zip(each[::2], each[1::2], strict=True)) for each in fields.get(b"modules", ())]
    return {name: fields[name] for name in FIELDS if name in fields}
