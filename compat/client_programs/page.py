"""The tables of docs/clients.md, from the results of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from compat.client_programs.clients import Client, clients
from compat.client_programs.places import PLACES
from compat.client_programs.results import At, Result
from compat.swap_programs.outcomes import Limit

MARKS = ("<!-- client programs: begin -->", "<!-- client programs: end -->")
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


def _row(client: Client, result: Result) -> str:
    cells = [_cell([at for at in result.runs if at.place == place]) for place in PLACES]
    return _line((f"{client.name} {client.version_text()}", client.about, *cells))


def _cell(runs: Sequence[At]) -> str:
    """Return the numbers of steps, and of the same ones where they are fewer: at the proxy and at serve, or at one."""
    texts = [f"{len(at.expected)} ✓" if not at.different else f"{at.same} of {len(at.expected)}" for at in runs]
    return ", ".join(dict.fromkeys(texts)) or "·"


def _row_in(page: str, client: Client) -> str | None:
    rows = page.partition(MARKS[0])[2].partition(MARKS[1])[0].splitlines()  # other tables have the same clients
    return next((line for line in rows if line.startswith(f"| {client.name} ")), None)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
