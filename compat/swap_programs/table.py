"""The tables of docs/swap-programs.md, from the results of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from compat.swap_programs.outcomes import Limit, Result
from compat.swap_programs.programs import PROGRAMS, Program

MARKS = ("<!-- programs: begin -->", "<!-- programs: end -->")


def tables(rows: Sequence[tuple[Program, Result]], limits: Iterable[Limit], former: str = "") -> str:
    """Return the table of programs and the table of intended differences, as Markdown.

    former: a page whose rows stay for programs that were not run.
    """
    made = {program.name: _row(program, result) for program, result in rows}
    kept = {each.name: _row_in(former, each) for each in PROGRAMS}
    lines = ["| program | what runs | checks | same through the proxy |", "| --- | --- | --- | --- |"]
    lines += filter(None, (made.get(each.name) or kept[each.name] for each in PROGRAMS))
    lines += ["", "| program | what differs | why |", "| --- | --- | --- |"]
    for limit in limits:
        names = ", ".join(f"`{each}`" for each in limit.checks)
        lines.append(f"| {limit.program} | {names} | {limit.reason} |")
    return "".join(f"{line}\n" for line in lines)


def _row(program: Program, result: Result) -> str:
    same = len(result.compared) - len([name for name in result.different if name in result.alone])
    sign = "✓" if not result.different else f"{same}"
    return f"| {program.name} ({program.versions()}) | {program.about} | {len(result.compared)} | {sign} |"


def _row_in(page: str, program: Program) -> str | None:
    return next((line for line in page.splitlines() if line.startswith(f"| {program.name} (")), None)
