"""Merges several servers' replies about their jobs into one. Pure.

Counts of keys are added up. While slots move, two servers may own the same slots. The second server's count is then
multiplied by the share of its slots that the first server does not own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import hiredis

from state_backend.model.slot_set import NONE, SlotSet

Row = dict[str, Any]


def rows_in(reply: bytes) -> list[Row]:
    """Parse a RESP2 reply: an array of maps."""
    reader = hiredis.Reader(encoding="utf-8", errors="surrogateescape")
    reader.feed(reply)
    return [dict(zip(row[::2], row[1::2], strict=True)) for row in reader.gets()]


def shares_of(slots_of_servers: Iterable[SlotSet]) -> list[float]:
    """Return, for each server, the share of its slots that no server before it owns. Its keys count by this share."""
    counted, shares = NONE, []
    for slots in slots_of_servers:
        shares.append(len(slots - counted) / len(slots) if slots else 0.0)
        counted |= slots
    return shares


def merged_jobs(answers: Sequence[Sequence[Row]]) -> list[Row]:
    """Merge the rows of STATE JOBS. A job has the oldest applied and the newest committed epoch of its rows."""
    merged = []
    for rows in _by("name", answers):
        newest = max(rows, key=lambda row: int(row["committed"]))
        shares = shares_of(SlotSet.parse(row["slots"]) for row in rows)
        owned = NONE
        for row in rows:
            owned |= SlotSet.parse(row["slots"])
        stored = {"store_bytes": sum(row["store_bytes"] for row in rows)} if "store_bytes" in newest else {}
        keys: Row = {"keys": _sum(rows, "keys", shares), "slots": str(owned)}
        if "state_names" in newest:
            keys["state_keys"] = _state_keys(newest["state_names"], rows, shares)
            keys["state_bytes"] = _state_bytes(newest["state_names"], rows)
        merged.append(newest | _progress(rows) | keys | stored)
    return merged


def _state_keys(names: Sequence[str], rows: Sequence[Row], shares: Sequence[float]) -> list[int | None]:
    """Return the number of keys of each state."""
    counts = [dict(zip(row["state_names"], row["state_keys"], strict=True)) for row in rows]
    return [_sum([{"keys": each.get(name, 0)} for each in counts], "keys", shares) for name in names]


def _state_bytes(names: Sequence[str], rows: Sequence[Row]) -> list[int | None]:
    """Return the bytes of each state, which each server reports for all slots; None if no server knows them."""
    sizes = [dict(zip(row["state_names"], row["state_bytes"], strict=True)) for row in rows]
    return [_largest(each.get(name) for each in sizes) for name in names]


def merged_lags(answers: Sequence[Sequence[Row]]) -> list[Row]:
    """Merge the rows of STATE LAG. A job has the largest lag of its rows."""
    return [rows[0] | _progress(rows) for rows in _by("job", answers)]


def merged_states(answers: Sequence[Sequence[Row]], shares: Sequence[float]) -> list[Row]:
    """Merge the rows of STATE LIST.

    Args:
        shares: See `shares_of`.
    """
    with_shares = [[row | {"share": share} for row in rows] for rows, share in zip(answers, shares, strict=True)]
    return [
        {
            "name": rows[0]["name"],
            "kind": rows[0]["kind"],
            "keys": _sum(rows, "keys", [row["share"] for row in rows]),
            "bytes": _largest(row.get("bytes") for row in rows),
        }
        for rows in _by("name", with_shares)
    ]


def keyspace_line(texts: Sequence[str], shares: Sequence[float]) -> str:
    """Merge INFO keyspace texts into the line of database 0; empty if there are no keys.

    The mean time to live is weighted by the number of keys with an expiry.
    """
    total = {"keys": 0.0, "expires": 0.0, "avg_ttl": 0.0, "subexpiry": 0.0}
    for text, share in zip(texts, shares, strict=True):
        line = next((line for line in text.splitlines() if line.startswith("db0:")), "")
        pairs = [pair.partition("=")[::2] for pair in line[len("db0:") :].split(",") if line]
        counted = {name: float(number) * share for name, number in pairs}
        counted["avg_ttl"] = counted.get("avg_ttl", 0.0) * counted.get("expires", 0.0)
        for name, number in counted.items():
            total[name] = total.get(name, 0.0) + number
    total["avg_ttl"] /= total["expires"] or 1.0
    counts = ",".join(f"{name}={round(number)}" for name, number in total.items())
    return f"db0:{counts}\r\n" if round(total["keys"]) else ""


def job_lines(jobs: Sequence[Row]) -> str:
    """Return the lines of INFO about jobs, as a server renders them."""
    stored = sum(row.get("store_bytes", 0) for row in jobs)
    lines = [f"sparkis_jobs:{len(jobs)}\r\nsparkis_store_bytes:{stored}\r\n"]
    for row in jobs:
        row_texts = {name: "unknown" if value is None else value for name, value in row.items()}
        held_back = "none" if row["held_back_epoch"] is None else row["held_back_epoch"]
        lines.append(
            f"job_{row_texts['name']}:epoch={row_texts['applied']},committed_epoch={row_texts['committed']},"
            f"lag_epochs={row_texts['lag_epochs']},lag_ms={row_texts['lag_ms']},committed_at={row_texts['committed_at']},"
            f"age_ms={row_texts['age_ms']},stale={row_texts['stale']},incomplete={row_texts['incomplete']},held_back_epoch={held_back},"
            f"keys={row_texts['keys']},store_bytes={row_texts.get('store_bytes', 0)}\r\n"
        )
    return "".join(lines)


def _by(name: str, answers: Sequence[Sequence[Row]]) -> Iterable[list[Row]]:
    """Group the rows of all servers by a field, in order of first occurrence."""
    found: dict[str, list[Row]] = {}
    for row in (row for rows in answers for row in rows):
        found.setdefault(row[name], []).append(row)
    return found.values()


def _progress(rows: Sequence[Row]) -> Row:
    applied, committed = min(row["applied"] for row in rows), max(row["committed"] for row in rows)
    lags = [row["lag_ms"] for row in rows]
    progress = {
        "applied": applied,
        "committed": committed,
        "lag_epochs": max(0, committed - applied),
        "lag_ms": None if None in lags else max(lags),
    }
    oldest = min(rows, key=lambda row: row["committed_at"] or "")  # None if a server has no visible epoch yet
    age = {"committed_at": oldest["committed_at"], "age_ms": oldest["age_ms"]}
    largest = ("stale", "incomplete", "skipped_rows", "epochs_per_minute", "changes_per_minute")
    flags = {name: max(row.get(name, 0) for row in rows) for name in largest}
    age |= _source_lag(rows) | _record_delays(rows)
    held_back = max(rows, key=lambda row: -1 if row["held_back_epoch"] is None else row["held_back_epoch"])
    age |= {"held_back_epoch": held_back["held_back_epoch"], "held_back_since": held_back["held_back_since"]}
    errors = dict.fromkeys(row["error"] for row in rows if row["error"])
    return progress | age | flags | {"error": "; ".join(errors)}


def _source_lag(rows: Sequence[Row]) -> Row:
    """Return the source lag of the server that is furthest behind; unknown, if one does not know it.

    Servers of an older version do not reply with it, and are left out.
    """
    named = [row for row in rows if "source_lag_records" in row]
    if not named:
        return {}
    furthest = max(named, key=lambda row: math.inf if row["source_lag_records"] is None else row["source_lag_records"])
    return {name: value for name, value in furthest.items() if name.startswith("source_")}


def _record_delays(rows: Sequence[Row]) -> Row:
    """Return the longest delays of the servers that know some, because all count the same records."""
    names = ("record_delay_p50_ms", "record_delay_p99_ms")
    return {name: _largest(row.get(name) for row in rows) for name in names if any(name in row for row in rows)}


def _sum(rows: Sequence[Row], name: str, shares: Sequence[float]) -> int | None:
    """Return the sum of a field, weighted by shares; None if one value is unknown."""
    if any(row[name] is None for row in rows):
        return None
    return round(sum(float(row[name]) * share for row, share in zip(rows, shares, strict=True)))


def _largest(numbers: Iterable[int | None]) -> int | None:
    """Return the largest known number; None if no server knows it. A server may know an older snapshot, or none yet."""
    return max((number for number in numbers if number is not None), default=None)


def plain(rows: Sequence[Row]) -> list[dict[bytes, Any]]:
    """Return rows with texts as bytes, which can be encoded as a reply."""
    return [{name.encode(): _plain(value) for name, value in row.items()} for row in rows]


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    return [_plain(each) for each in value] if isinstance(value, list) else value
