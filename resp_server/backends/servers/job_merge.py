"""Merges several servers' replies about their jobs into one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import hiredis

from resp_server.commands.fact_merges import Row, largest_known, newest, sum_of
from resp_server.commands.job_facts import info_text, merged_row


def rows_in(reply: bytes) -> list[Row]:
    """Parse a RESP2 reply: an array of maps."""
    reader = hiredis.Reader(encoding="utf-8", errors="surrogateescape")
    reader.feed(reply)
    return [dict(zip(row[::2], row[1::2], strict=True)) for row in reader.gets()]


def merged_jobs(answers: Sequence[Sequence[Row]]) -> list[Row]:
    """Merge the rows of STATE JOBS."""
    return [merged_row(rows, newest(rows)) for rows in _by("name", answers)]


def merged_lags(answers: Sequence[Sequence[Row]]) -> list[Row]:
    """Merge the rows of STATE LAG."""
    return [merged_row(rows, rows[0]) for rows in _by("job", answers)]


def merged_states(answers: Sequence[Sequence[Row]], shares: Sequence[float]) -> list[Row]:
    """Merge the rows of STATE LIST.

    Args:
        shares: See `fact_merges.shares_of`.
    """
    with_shares = [[row | {"share": share} for row in rows] for rows, share in zip(answers, shares, strict=True)]
    return [
        {
            "name": rows[0]["name"],
            "kind": rows[0]["kind"],
            "keys": sum_of([row["keys"] for row in rows], [row["share"] for row in rows]),
            "bytes": largest_known([row for row in rows if "bytes" in row], "bytes"),
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
    lines += [f"job_{row['name']}:{info_text(row)}\r\n" for row in jobs]
    return "".join(lines)


def _by(name: str, answers: Sequence[Sequence[Row]]) -> Iterable[list[Row]]:
    """Group the rows of all servers by a field, in order of first occurrence."""
    found: dict[str, list[Row]] = {}
    for row in (row for rows in answers for row in rows):
        found.setdefault(row[name], []).append(row)
    return found.values()
