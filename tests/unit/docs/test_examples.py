"""The examples of the docs that need no Spark run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from state_backend.compact import compact_log
from state_backend.log_writer import LogWriter
from state_backend.records import Change, Op

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_a_log_is_written_and_read_without_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with_arrow, without_spark = BLOCK.findall((ROOT / "docs" / "change-log.md").read_text())
    names: dict[str, Any] = {}
    exec(compile(without_spark, "change-log.md", "exec"), names)
    assert capsys.readouterr().out == "b'12.5'\n"
    with LogWriter("./log", "market", names["states"]) as writer:
        writer.publish([Change("price", Op.PUT, b"market:price:B", value=b"7")])
    compact_log("./log", "market", retention_ms=0)
    exec(compile(with_arrow, "change-log.md", "exec"), {})
    assert "market:price:B" in capsys.readouterr().out
