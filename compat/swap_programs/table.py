"""The tables of docs/swap-programs.md, from the results of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from compat.swap_programs.outcomes import Limit, Result
from compat.swap_programs.programs import Program

MARKS = ("<!-- programs: begin -->", "<!-- programs: end -->")


def tables(rows: Sequence[tuple[Program, Result]], limits: Iterable[Limit]) -> str:
    """Return the table of programs and the table of intended differences, as Markdown."""
    lines = ["| program | what runs | checks | same through the proxy |", "| --- | --- | --- | --- |"]
    for program, result in rows:
        same = len(result.compared) - len([name for name in result.different if name in result.alone])
        sign = "✓" if not result.different else f"{same}"
        lines.append(f"| {program.name} ({program.versions()}) | {program.about} | {len(result.compared)} | {sign} |")
    lines += ["", "| program | what differs | why |", "| --- | --- | --- |"]
    for limit in limits:
        names = ", ".join(f"`{each}`" for each in limit.checks)
        lines.append(f"| {limit.program} | {names} | {limit.reason} |")
    return "".join(f"{line}\n" for line in lines)
