"""`make bench`: run the benchmarks, print the ratios, write benchmarks/results.json."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.reads import Row, read_rows

RESULTS = Path(__file__).with_name("results.json")


def main() -> int:
    """Run what was asked for; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--keys", type=int, default=100_000, help="keys in the state (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds against each server (default %(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="times the usual number of requests (default 1)")
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results.json as it is")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, {options.keys:,} keys, "
          f"{options.rounds} rounds in turns; medians")  # fmt: skip
    print(f"{'':34}{'sparkis':>12}{'redis':>12}{'ratio':>8}  {'spread':13}{'CPU us/request':>16}")
    rows = []
    for row in read_rows(options.keys, options.rounds, options.scale, report):
        report("")
        print(line(row), flush=True)
        rows.append(asdict(row))
    if not options.no_write:
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"written to {RESULTS.parent.name}/{RESULTS.name}")
    return 0


def report(text: str) -> None:
    """Show what is going on, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def line(row: Row) -> str:
    """Return a row as a line of the table."""
    spread = f"{row.ratio_low:.2f}-{row.ratio_high:.2f}"
    cpu = f"{row.ours_cpu_us:.2f} / {row.peer_cpu_us:.2f}"
    return f"{row.name:34}{row.ours:12,.0f}{row.peer:12,.0f}{row.ratio:8.2f}  {spread:13}{cpu:>16}"


if __name__ == "__main__":
    sys.exit(main())
