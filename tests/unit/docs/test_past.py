"""The lines of docs/past.md that hand a state over to pandas, Polars and DuckDB."""

from __future__ import annotations

import ast
import re
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pytest

from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

PAGE = (Path(__file__).parents[3] / "docs" / "past.md").read_text()
[BLOCK] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
AS_OF_MS = 1_795_521_600_000  # the page's time
STATE = StateDescriptor(
    "price",
    key=["ticker", "day"],
    value=["price", "amount", "at", "is_open"],
    separator="/",
    columns={
        "ticker": "string", "day": "date", "price": "double", "amount": "decimal(10,2)", "at": "timestamp",
        "is_open": "boolean",
    },
)  # fmt: skip
NAMES = ["key", "ticker", "day", "price", "amount", "at", "is_open", "expire_at"]
READ_TIME = datetime(2026, 11, 24, 11, 59, 58, 500_000, UTC)
ACME = ["market:price:ACME/2026-11-24", "ACME", date(2026, 11, 24), 12.5, Decimal("3.10"), READ_TIME, True, None]
INIT = ["market:price:INIT/2026-11-23", "INIT", date(2026, 11, 23), 0.25, None, None, None, None]


@pytest.fixture(scope="module")
def handed_over(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return the values of the page's last three lines."""
    log = tmp_path_factory.mktemp("log")

    def fields_of(key: list[Any], **fields: bytes) -> list[Change]:
        return [Change("price", Op.PUT, key[0].encode(), name.encode(), value) for name, value in fields.items()]

    with LogWriter(log, "market", [STATE]) as writer:
        first = fields_of(ACME, price=b"12.5", amount=b"3.10", at=b"2026-11-24T11:59:58.5Z", is_open=b"true")
        writer.publish([*first, *fields_of(INIT, price=b"0.25")], clock_ms=AS_OF_MS - 1)
        writer.publish(fields_of(ACME, price=b"99"), clock_ms=AS_OF_MS + 1)
    *before, of_pandas, of_polars, of_duckdb = ast.parse(BLOCK.replace("/data/log", str(log))).body
    names: dict[str, Any] = {"polars": pl, "duckdb": duckdb}
    exec(compile(ast.Module(before, []), "past.md", "exec"), names)
    lines = [each for each in (of_pandas, of_polars, of_duckdb) if isinstance(each, ast.Expr)]
    return [eval(compile(ast.Expression(each.value), "past.md", "eval"), names) for each in lines]


def test_pandas_takes_table(handed_over: list[Any]) -> None:
    frame = handed_over[0].sort_values("key")
    assert isinstance(frame, pd.DataFrame)
    assert list(frame.columns) == NAMES
    rows = frame.astype(object).where(frame.notna(), None).to_numpy().tolist()
    assert rows == [ACME, INIT]
    assert str(frame.dtypes["price"]) == "float64"
    assert str(frame.dtypes["at"]) == "datetime64[us, UTC]"


def test_polars_takes_table(handed_over: list[Any]) -> None:
    frame = handed_over[1].sort("key")
    assert isinstance(frame, pl.DataFrame)
    assert frame.columns == NAMES
    assert [list(row) for row in frame.rows()] == [ACME, INIT]
    assert frame.schema["amount"] == pl.Decimal(10, 2)


def test_duckdb_takes_table(handed_over: list[Any]) -> None:
    relation = handed_over[2].order("key")
    assert relation.columns == NAMES
    assert [list(row) for row in relation.fetchall()] == [ACME, INIT]
    assert [str(each) for each in relation.types[2:6]] == [
        "DATE",
        "DOUBLE",
        "DECIMAL(10,2)",
        "TIMESTAMP WITH TIME ZONE",
    ]
