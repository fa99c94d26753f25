"""What `make programs` runs: each program at a redis-server alone and through a proxy, and their comparison."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from compat.conformance.page import put_into
from compat.processes import end_in_order
from compat.swap_programs import table
from compat.swap_programs.outcomes import Limit, Result, limits
from compat.swap_programs.programs import PROGRAMS, Program
from compat.swap_programs.targets import Targets, running_targets

PRINTED_CHARS_MAX = 600


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen programs; 1 if one found a difference that is not intended, or a read of a state was wrong."""
    options = _options(arguments)
    end_in_order()
    chosen = [each for each in PROGRAMS if each.name in (options.program or [each.name])]
    intended = limits()
    is_good = True
    rows = []
    with running_targets() as targets:
        for program in chosen:
            result = run_at_both(program, targets)
            is_good &= _print_result(result, intended)
            rows.append((program, result))
        reads = targets.reads
    print(f"{reads.count} reads of the job's state beside the programs, {len(reads.wrong)} of them wrong")
    print("".join(f"  {each[:PRINTED_CHARS_MAX]}\n" for each in reads.wrong[:3]), end="")
    if options.page is not None:
        former = options.page.read_text(encoding="utf-8") if options.program else ""
        put_into(options.page, table.tables(rows, intended, former), table.MARKS)
    return 0 if is_good and not reads.wrong else 1


def run_at_both(program: Program, targets: Targets) -> Result:
    """Run a program at both addresses, each emptied before."""
    outcomes = []
    for target in (targets.alone, targets.swapped):
        target.empty()
        outcomes.append(program.run(target))
    return Result(program.name, *outcomes)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m compat.swap_programs", description=__doc__)
    names = [each.name for each in PROGRAMS]
    parser.add_argument("--program", action="append", choices=names, help="this program alone; may be repeated")
    parser.add_argument(
        "--page",
        metavar="FILE",
        type=Path,
        help="write the tables, or the rows of --program, between the marks of this file",
    )
    return parser.parse_args(arguments)


def _print_result(result: Result, intended: Sequence[Limit]) -> bool:
    """Print a program's differences; return whether all of them are intended."""
    unexplained, unneeded = result.unexplained(intended), result.unneeded(intended)
    failed = len(result.alone) - len(result.compared)
    not_compared = f"; {failed} tests fail at redis-server alone, and are not compared" if failed else ""
    print(f"{result.program}: {len(result.compared)} checks, {len(result.different)} differ{not_compared}", flush=True)
    for name in unexplained:
        print(f"  ✗ {name}")
        print(f"      alone:   {_shortened(result.alone.get(name))}")
        print(f"      swapped: {_shortened(result.swapped.get(name))}", flush=True)
    for name in result.broken:
        print(f"  ✗ {name} fails at redis-server alone: {_shortened(result.alone[name])}")
    for glob in unneeded:
        print(f"  ✗ {glob} of limits.toml covers no difference any more: remove it")
    return bool(result.compared) and not (unexplained or unneeded or result.broken)


def _shortened(outcome: object) -> str:
    text = repr(outcome)
    return text if len(text) <= PRINTED_CHARS_MAX else text[:PRINTED_CHARS_MAX] + "..."


if __name__ == "__main__":
    sys.exit(main())
