"""Keys as texts, and whole values of keys as Python objects, whatever the kind of their state."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from state_backend.model.descriptor import Kind
from state_backend.store.store import KeyInfo, Snapshot

# Bytes; a hash as a dict; a list; a set as its sorted members; a sorted set as (member, score) by rank.
WholeValue = bytes | dict[bytes, bytes] | list[bytes] | list[tuple[bytes, float]]


def whole_value(snapshot: Snapshot, info: KeyInfo) -> WholeValue:
    """Return the value of a key that exists. Memory grows with the value."""
    key = info.key
    match info.kind:
        case Kind.MAP:
            return dict(sorted(snapshot.map_pairs(key)))
        case Kind.LIST:
            return list(snapshot.list_elements(key, 0, snapshot.list_size(key)))
        case Kind.SET:
            return sorted(snapshot.members(key))
        case Kind.SORTED_SET:
            return list(snapshot.sorted_members(key, 0, snapshot.sorted_size(key)))
        case _:
            return snapshot.value(key) or b""


def key_in_json(key: bytes) -> dict[str, str | None]:
    """Return the members of a JSON object for a key: of bytes that are no text, `key_hex` in place of `key`."""
    try:
        return {"key": key.decode()}
    except UnicodeDecodeError:
        return {"key": None, "key_hex": key.hex()}


def value_in_json(value: WholeValue | None) -> dict[str, Any]:
    """Return the members of a JSON object for a value.

    If some bytes of the value are no text, `value` is null, and `value_hex` has the value with all bytes in hex.
    """
    try:
        return {"value": _with_texts(value, bytes.decode)}
    except UnicodeDecodeError:
        return {"value": None, "value_hex": _with_texts(value, bytes.hex)}


def _with_texts(value: Any, text_of: Callable[[bytes], str]) -> Any:
    """Return a value with texts in place of bytes. Scores that JSON lacks are texts, as in all JSON of sparkis."""
    if isinstance(value, bytes):
        return text_of(value)
    if isinstance(value, dict):
        return {text_of(name): text_of(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_texts(each, text_of) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e21 else value


def shown_key(key: bytes) -> str:
    """Return a key for a terminal: a text as it is, other bytes in quotes, as redis-cli shows them."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return f'"{str(key)[2:-1]}"'
    return text if text.isprintable() else json.dumps(text)
