"""The examples of the docs that need no Spark run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from state_backend.apply.compact import compact_log
from state_backend.log.log_writer import LogWriter
from state_backend.model.records import Change, Op

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_log_is_written_and_read_without_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall((ROOT / "docs" / "change-log.md").read_text())
    with_arrow, with_duckdb, without_spark = (compile(block, "change-log.md", "exec") for block in blocks)
    names: dict[str, Any] = {}
    exec(without_spark, names)
    assert capsys.readouterr().out == "b'12.5'\n"

    many = [Change("price", Op.PUT, b"market:price:%d" % number, value=b"7" * 100) for number in range(1000)]
    with LogWriter("./log", "market", names["states"]) as writer:
        writer.publish(many)  # a file of their own: the others were few and stand in their epochs
    exec(with_arrow, {})
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == (
        "0 [{'state': 'price', 'op': 1, 'key': b'market:price:ACME', 'field': None, 'value': b'12.5', "
        "'expire_at_ms': None}]"
    )
    assert "'op': 2, 'key': b'market:price:ACME'" in second
    assert third.count("'op': 1") == len(many)

    compact_log("./log", "market", retention_ms=3_600_000)
    exec(with_duckdb, {})
    epochs, snapshot = capsys.readouterr().out.split("\n\n", 1)
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in epochs.splitlines()]
    assert [row for row in cells if row and row[0].isdigit()] == [["0", "1", "0"], ["1", "1", "0"], ["2", "1000", "1"]]
    assert "market:price:0" in snapshot
    assert "market:price:ACME" not in snapshot
