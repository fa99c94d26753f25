"""The tables of docs/clients.md and docs/read-only.md, from the results of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from compat.client_programs.clients import Client, clients
from compat.client_programs.places import PLACES, SERVER
from compat.client_programs.results import At, Result
from compat.swap_programs.outcomes import Limit

MARKS = ("<!-- client programs: begin -->", "<!-- client programs: end -->")
REFUSALS_MARKS = ("<!-- refused writes: begin -->", "<!-- refused writes: end -->")
# How the names of these steps end.
REFUSED = ("a refused write", "a refused transaction", "a read after it")
HEADS = ("client", "what its program does", "with an upstream", "server", "TLS, ACL user", "cluster, a server killed")


def tables(results: Sequence[tuple[Client, Result]], limits: Iterable[Limit], former: str = "") -> str:
    """Return the table of clients and the table of intended differences, if there are any, as Markdown.

    former: a page whose rows stay for clients that were not run.
    """
    made = {client.name: _row(client, result) for client, result in results}
    rows = [made.get(each.name) or _row_in(former, each) for each in clients()]
    lines = [_line(HEADS), _line(["---"] * len(HEADS)), *filter(None, rows)]
    given = list(limits)
    if given:
        lines += ["", _line(("client", "what differs", "why")), _line(["---"] * 3)]
    for limit in given:
        lines.append(_line((limit.program, ", ".join(f"`{each}`" for each in limit.checks), limit.reason)))
    return "".join(f"{line}\n" for line in lines)


def refusals(results: Sequence[tuple[Client, Result]], former: str = "") -> str:
    """Return the table of what clients make of a write at a server that only reads, as Markdown.

    former: a page whose rows stay for clients that were not run.
    """
    heads = ("client", "a write", "a transaction with a write", "a read after the write")
    made = {client.name: _refusal(client, result) for client, result in results}
    rows = [made.get(each.name) or _row_in(former, each, REFUSALS_MARKS) for each in clients() if SERVER in each.places]
    return "".join(f"{line}\n" for line in (_line(heads), _line(["---"] * len(heads)), *filter(None, rows)))


def _refusal(client: Client, result: Result) -> str | None:
    """Return a client's row: the different results of these steps. None for a client that writes nothing."""
    steps = {name: found for at in result.runs if at.place == SERVER for name, found in at.found.items()}
    found = [dict.fromkeys(each for name, each in steps.items() if name.endswith(end)) for end in REFUSED]
    if not found[0]:
        return None
    cells = [", ".join(f"`{each}`" for each in different) or "·" for different in found]
    return _line((f"{client.name} {client.version_text()}", *cells))


def _row(client: Client, result: Result) -> str:
    cells = [_cell([at for at in result.runs if at.place == place]) for place in PLACES]
    return _line((f"{client.name} {client.version_text()}", client.about, *cells))


def _cell(runs: Sequence[At]) -> str:
    """Return the numbers of steps, and of the same ones where they are fewer: at the proxy and at serve, or at one."""
    texts = [f"{len(at.expected)} ✓" if not at.different else f"{at.same} of {len(at.expected)}" for at in runs]
    return ", ".join(dict.fromkeys(texts)) or "·"


def _row_in(page: str, client: Client, marks: tuple[str, str] = MARKS) -> str | None:
    rows = page.partition(marks[0])[2].partition(marks[1])[0].splitlines()  # other tables have the same clients
    return next((line for line in rows if line.startswith(f"| {client.name} ")), None)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
