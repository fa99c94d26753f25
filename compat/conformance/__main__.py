"""What `make conformance` runs: random commands to a real server and to ours, and real clients at both.

With two addresses: only random commands, between these servers, which need the data set.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compat.conformance import page
from compat.conformance.differential import Address, both_kinds, differences
from compat.conformance.matrix import CLIENTS, Cell, Script, cells_of
from compat.conformance.targets import Targets, running_targets
from compat.conformance.transcripts import Replay, replays
from compat.processes import end_in_order

PARTS = ("commands", "clients", "transcripts")


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen comparisons; 1 if there was a difference."""
    options = _options(arguments)
    end_in_order()
    is_good = True
    if "commands" in options.part:
        with _addresses(options) as (left, right):
            is_good &= _compare(left, right, options.examples)
    cells: list[Cell] = []
    versions: dict[str, str] = {}
    replayed: list[Replay] = []
    if {"clients", "transcripts"} & set(options.part):
        with running_targets() as targets:
            if "clients" in options.part:
                for cell in _run_clients(options, targets, versions):
                    cells.append(cell)
                    _print_result(cell.is_right, f"{cell.client}, {cell.feature}, {cell.target}", cell.problem)
            if "transcripts" in options.part:
                for replay in replays(targets):
                    replayed.append(replay)
                    _print_result(replay.is_right, f"{replay.client}, replayed, {replay.target}", replay.problem)
    if cells and replayed and not options.client and not options.feature:
        text = page.tables(cells, versions, replayed)
        print(f"\n{text}")
        if options.page is not None:
            page.put_into(options.page, text)
    failed = [cell for cell in cells if cell.is_right is False], [each for each in replayed if not each.is_right]
    is_good &= not any(failed)
    print(f"{len(cells)} cells and {len(replayed)} replays, of which failed: {len(failed[0])} and {len(failed[1])}")
    return 0 if is_good else 1


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m compat.conformance", description=__doc__)
    parser.add_argument("--left", metavar="HOST:PORT", type=Address.of, help="a real server")
    parser.add_argument("--right", metavar="HOST:PORT", type=Address.of, help="the server that is compared with it")
    parser.add_argument("--examples", metavar="N", type=int, default=30, help="pipelines of each command (30)")
    parser.add_argument("--part", action="append", choices=PARTS, help="run this part alone; may be repeated")
    parser.add_argument("--client", action="append", choices=[each.name for each in CLIENTS], help="this client alone")
    parser.add_argument("--feature", action="append", metavar="NAME", help="this feature alone")
    parser.add_argument("--page", metavar="FILE", type=Path, help="write the tables between the marks of this file")
    options = parser.parse_args(arguments)
    if (options.left is None) != (options.right is None):
        parser.error("--left and --right belong together")
    options.part = options.part or (["commands"] if options.left else list(PARTS))
    return options


@contextmanager
def _addresses(options: argparse.Namespace) -> Iterator[tuple[Address, Address]]:
    if options.left is not None:
        yield options.left, options.right
    else:
        with both_kinds() as addresses:
            yield addresses


def _compare(left: Address, right: Address, examples: int) -> bool:
    commands = requests = 0
    is_good = True
    for name, sent, found in differences(left, right, examples):
        commands, requests, is_good = commands + 1, requests + sent, is_good and not found
        for each in found:
            _print_result(False, name, each)
    print(f"{requests} requests of {commands} commands, in RESP2 and RESP3: {'alike' if is_good else 'NOT alike'}")
    return is_good


def _run_clients(options: argparse.Namespace, targets: Targets, versions: dict[str, str]) -> Iterator[Cell]:
    for client in CLIENTS:
        if options.client and client.name not in options.client:
            continue
        with Script(client) as script:
            versions[client.name] = script.version
            chosen = [each for each in script.features if each in (options.feature or script.features)]
            yield from cells_of(script, chosen, targets)


def _print_result(is_right: bool | None, what: str, problem: str) -> None:
    sign = page.SIGNS[is_right]
    print(f"{sign} {what}" + (f": {problem}" if problem else ""), flush=True)


if __name__ == "__main__":
    sys.exit(main())
