"""The tables of the pages: rows of clients that were run, and of those that were not."""

from __future__ import annotations

from compat.client_programs import page
from compat.client_programs.clients import Client, clients
from compat.client_programs.results import At, Result

REDIS_PY = next(each for each in clients() if each.name == "redis-py")
TABLE_BEFORE = f"{page.REFUSALS_MARKS[0]}\n| ioredis 1.0.0 | `old` | · | `7` |\n{page.REFUSALS_MARKS[1]}\n"


def table_after(client: Client, **steps: str) -> str:
    """Return the table after a run of one client at a server."""
    found = {name.replace("_", " "): result for name, result in steps.items()}
    return page.refusals([(client, Result(client.name, [At("server", "server", found, found)]))], TABLE_BEFORE)


def test_each_different_result_of_refused_write_is_shown_once_with_clients_version() -> None:
    table = table_after(
        REDIS_PY, RESP2_a_refused_write="READONLY", RESP3_a_refused_write="READONLY", RESP3_a_read_after_it="'7'"
    )
    assert f"| redis-py {REDIS_PY.version_text()} | `READONLY` | · | `'7'` |\n" in table


def test_rows_of_clients_that_were_not_run_stay() -> None:
    assert "| ioredis 1.0.0 | `old` | · | `7` |\n" in table_after(REDIS_PY, a_refused_write="READONLY")


def test_client_that_cannot_write_has_no_row() -> None:
    assert "redis-py" not in table_after(REDIS_PY, GET="'7'")
