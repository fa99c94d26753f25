"""The JSON files of a log: objects with a checksum, so that no reader takes a damaged file for what a writer wrote.

    {..., "checksum": 2769230134}    CRC32 of the object without this field, as `json.dumps(…, sort_keys=True)` has it

The checksum is of the content, not of the bytes. So other tools read the files as plain JSON, and a copy that is
written anew stays valid.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from zlib import crc32

CHECKSUM = "checksum"


def with_checksum(content: Mapping[str, Any], indent: int | None = None) -> bytes:
    """Return the file of an object that has no checksum yet."""
    return json.dumps({**content, CHECKSUM: crc32(_checked_text(content))}, indent=indent).encode() + b"\n"


def checked_object(stored: bytes, *, needs_checksum: bool = False) -> dict[str, Any]:
    """Return the object in a file, without its checksum; ValueError, with the reason, if the file is damaged.

    Only epochs had a checksum at first, so other files of older logs have none: they are read as they are.
    """
    try:
        content = json.loads(stored)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or (needs_checksum and CHECKSUM not in content):
        raise ValueError("is not a complete file of a log")
    if CHECKSUM in content and content.pop(CHECKSUM) != crc32(_checked_text(content)):
        raise ValueError("does not match its checksum")
    return content


def _checked_text(content: Mapping[str, Any]) -> bytes:
    """Return the text that the checksum is of."""
    return json.dumps(content, sort_keys=True).encode()
