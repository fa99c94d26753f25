"""Reads keys and values a page at a time: no request reads more than a page, however large the key is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkis_ui.client import Client, RefusedError, RequestError
from sparkis_ui.facts import Node, integer, text_of
from sparkis_ui.text import decimal

PAGE_ELEMENTS = 50
PAGE_BYTES = 4 << 20  # of the elements of a page together, by their mean size
TEXT_BYTES = 4096  # a page of a string
JSON_BYTES_MAX = 64 << 10  # a longer string is shown as text
KEYS_OF_A_PAGE = 50
# A step of SCAN begins with a page's COUNT, which doubles while too few keys match: some 13,000 keys a request at most.
SCAN_COUNT_MAX = 1000
SCAN_STEPS_MAX = 16


@dataclass
class Value:
    """A page of a key's value.

    Args:
        kind: The reply of TYPE.
        rows: Fields and values, or ranks, members and scores.
    """

    key: bytes
    kind: str = "none"
    ttl_ms: int = -1
    length: int = 0
    size: int | None = None
    text: bytes = b""
    parsed: Any = None
    is_json: bool = False
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    next: str = ""
    job: str = ""
    state: str = ""
    slot: int | None = None
    where: str = ""


async def read_value(client: Client, key: bytes, at: str = "", pattern: bytes = b"") -> Value:
    """Read a page of a value.

    Args:
        at: The offset or cursor at which it begins.
    """
    kind, ttl_ms, located, size = await client.execute_all(
        ("TYPE", key), ("PTTL", key), ("STATE", "LOCATE", key), ("MEMORY", "USAGE", key)
    )
    if isinstance(kind, RefusedError):
        raise kind
    value = Value(key, text_of(kind), ttl_ms if isinstance(ttl_ms, int) else -1, size=integer(size))
    if not isinstance(located, RefusedError):
        value.job, value.state = (text_of(located.get(name) or b"") for name in (b"job", b"state"))
        value.slot, value.where = integer(located.get(b"slot")), text_of(located.get(b"where") or b"")
    offset = decimal(at)
    readers = {"string": _string, "list": _list, "hash": _hash, "set": _set, "zset": _sorted_set}
    if value.kind in readers:
        await readers[value.kind](client, value, offset, pattern)
    return value


async def _string(client: Client, value: Value, offset: int, pattern: bytes) -> None:
    value.length = await client.execute("STRLEN", value.key)
    is_short = value.length <= JSON_BYTES_MAX and not offset
    last = (JSON_BYTES_MAX if is_short else offset + TEXT_BYTES) - 1
    value.text = await client.execute("GETRANGE", value.key, offset, last)
    if is_short and value.text[:1] in (b"{", b"["):
        try:
            value.parsed, value.is_json = json.loads(value.text), True
        except (ValueError, RecursionError):
            pass
    if not value.is_json:
        value.text = value.text[:TEXT_BYTES]
        value.next = _after(offset, TEXT_BYTES, value.length)


async def _list(client: Client, value: Value, offset: int, pattern: bytes) -> None:
    value.length = await client.execute("LLEN", value.key)
    count = _page(value)
    found = await client.execute("LRANGE", value.key, offset, offset + count - 1)
    value.rows = [(offset + index, each) for index, each in enumerate(found) if pattern in each]
    value.next = _after(offset, count, value.length)


async def _sorted_set(client: Client, value: Value, offset: int, pattern: bytes) -> None:
    value.length = await client.execute("ZCARD", value.key)
    count = _page(value)
    if pattern:
        flat, value.next = await _scan(client, "ZSCAN", value, offset, pattern, items=2)
        pairs = scored(flat)
        value.rows = [("", member, score) for member, score in sorted(pairs, key=lambda pair: -pair[1])]
        return
    pairs = scored(await client.execute("ZREVRANGE", value.key, offset, offset + count - 1, "WITHSCORES"))
    value.rows = [(offset + index + 1, member, score) for index, (member, score) in enumerate(pairs)]
    value.next = _after(offset, count, value.length)


async def _hash(client: Client, value: Value, offset: int, pattern: bytes) -> None:
    value.length = await client.execute("HLEN", value.key)
    flat, value.next = await _scan(client, "HSCAN", value, offset, pattern, items=2)
    value.rows = list(zip(flat[::2], flat[1::2], strict=True))


async def _set(client: Client, value: Value, offset: int, pattern: bytes) -> None:
    value.length = await client.execute("SCARD", value.key)
    members, value.next = await _scan(client, "SSCAN", value, offset, pattern)
    value.rows = [(member,) for member in members]


async def _scan(
    client: Client, command: str, value: Value, cursor: int, pattern: bytes, items: int = 1
) -> tuple[list[Any], str]:
    """Return a page of matching elements, and the cursor after it; empty at the end.

    It takes at most `SCAN_STEPS_MAX` steps.

    Args:
        items: The number of items of the reply for each element.
    """
    found: list[Any] = []
    count = _page(value)
    wanted, count_max = items * count, _page(value, SCAN_COUNT_MAX) if pattern else count
    for _ in range(SCAN_STEPS_MAX):
        reply, elements = await client.execute(command, value.key, cursor, *_match(pattern), "COUNT", count)
        cursor, count = int(reply), min(2 * count, count_max)
        found += elements
        if cursor == 0 or len(found) >= wanted:
            break
    return found, str(cursor or "")


def scored(reply: Sequence[Any]) -> list[tuple[bytes, float]]:
    """Return members and scores, of pairs or of a flat array."""
    if reply and isinstance(reply[0], list | tuple):
        return [(member, float(score)) for member, score in reply]
    return [(member, float(score)) for member, score in zip(reply[::2], reply[1::2], strict=True)]


def _page(value: Value, most: int = PAGE_ELEMENTS) -> int:
    """Return the number of elements of a page: fewer than `most` if they are large."""
    mean = (value.size or 0) / max(1, value.length)
    return max(1, min(most, int(PAGE_BYTES / max(1.0, mean))))


def _after(offset: int, count: int, length: int) -> str:
    return str(offset + count) if offset + count < length else ""


def _match(pattern: bytes) -> tuple[str | bytes, ...]:
    return ("MATCH", _contains(pattern)) if pattern else ()


def _contains(pattern: bytes) -> bytes:
    """Return a pattern unchanged; a text without wildcards becomes the pattern of all names that contain it."""
    return pattern if any(each in pattern for each in b"*?[") else b"*" + pattern + b"*"


@dataclass
class Keys:
    """A page of keys with their types.

    Args:
        cursor: The cursor of the next page, empty at the end.
    """

    keys: list[tuple[bytes, str]]
    cursor: str
    steps: int


async def read_keys(
    client: Client, pattern: bytes, cursor: str = "", nodes: Sequence[Node] = (), count_min: int = KEYS_OF_A_PAGE
) -> Keys:
    """Return the next keys that match a pattern, by SCAN alone: at least `count_min`, if SCAN soon finds as many.

    Args:
        nodes: The masters of a cluster, which are scanned one after another. A cursor is `number of the node:cursor`.
    """
    at_node, _, at = cursor.rpartition(":")
    number, position = decimal(at_node), decimal(at)
    found: dict[bytes, None] = {}
    count, steps = count_min, 0
    while steps < SCAN_STEPS_MAX:
        steps += 1
        server = client.at(nodes[number].host, nodes[number].port) if number < len(nodes) else client
        reply, keys = await server.execute("SCAN", position, "MATCH", pattern or b"*", "COUNT", count)
        position, count = int(reply), min(2 * count, SCAN_COUNT_MAX)
        found |= dict.fromkeys(keys)
        if position == 0:
            number += 1
        if len(found) >= count_min or (position == 0 and number >= max(1, len(nodes))):
            break
    is_end = position == 0 and number >= max(1, len(nodes))
    kinds = await asyncio.gather(*(kind_of(client, key) for key in found))
    return Keys(list(zip(found, kinds, strict=True)), "" if is_end else f"{number}:{position}", steps)


async def kind_of(client: Client, key: bytes) -> str:
    """Return the type of a key; empty if it cannot be read."""
    try:
        return text_of(await client.execute("TYPE", key))
    except RequestError:
        return ""
