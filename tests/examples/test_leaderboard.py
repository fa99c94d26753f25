"""The notebook runs from its first cell to its last one, and shows what its job has computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from compat.waiting import WAIT_S_MAX
from tests.examples.example import ROOT, environment

pytestmark = pytest.mark.spark


class Frontend(NotebookClient):
    """Runs a notebook, and counts how often a picture was drawn anew."""

    redrawn = 0

    def process_message(self, message: dict[str, Any], cell: Any, cell_index: int) -> Any:
        self.redrawn += message["msg_type"] == "update_display_data"
        return super().process_message(message, cell, cell_index)


@pytest.mark.slow
def test_notebook_draws_leaderboard_that_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(MPLCONFIGDIR=str(tmp_path), TMPDIR=str(tmp_path)).items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(ROOT / "examples" / "leaderboard.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # outputs are not committed
    frontend = Frontend(notebook, timeout=int(WAIT_S_MAX), resources={"metadata": {"path": str(tmp_path)}})
    frontend.execute()

    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    texts = "".join(output.get("text", "") for output in outputs)
    assert "ZREVRANGE game:top 0 2 WITHSCORES" in texts
    assert "its rank is 0" in texts
    assert "8 players" in texts
    [table] = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert "<th>points</th>" in table and "ada" in table
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
    assert frontend.redrawn == 5
