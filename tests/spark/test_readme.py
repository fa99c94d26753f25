"""The README's quick start and its second example run as they stand there: as a program, and in a notebook."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
import redis
from nbclient import NotebookClient

from compat.waiting import WAIT_S_MAX, eventually
from tests.examples.example import ROOT, environment

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"[0-9.]+")
QUICK_START, SEVERAL_STATES = BLOCK.findall((ROOT / "README.md").read_text())


def test_quick_start_prints_line_that_reads_it(tmp_path: Path) -> None:
    assert len(QUICK_START.strip().splitlines()) <= 16
    (tmp_path / "quickstart.py").write_text(QUICK_START)
    with (
        (tmp_path / "stderr").open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "quickstart.py"],
            cwd=tmp_path,
            # Unbuffered, as on a terminal. The server's record is in the cache.
            env=environment(PYTHONUNBUFFERED="1", XDG_CACHE_HOME=str(tmp_path / "cache")),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as program,
    ):
        assert program.stdout is not None
        command = program.stdout.readline()
        try:
            assert command.startswith("redis-cli -u redis://127.0.0.1:"), (tmp_path / "stderr").read_text()
            assert 0 <= float(eventually(lambda: printed_by(command), NUMBER.fullmatch)) <= 30
            assert program.poll() is None
            (told,) = [line for line in (tmp_path / "stderr").read_text().splitlines() if "sparkis" in line]
            assert told.startswith(f"started a server for {tmp_path}/quickstart/log at port ")
            assert (
                "it stays 600 s after a crash of the driver. To end it at once: endpoint.stop(), or: sparkis stop"
                in told
            )
        finally:
            program.send_signal(signal.SIGINT)
            program.wait(WAIT_S_MAX)
    assert "Connection refused" in printed_by(command)


def printed_by(command: str) -> str:
    """Return what a command of redis-cli prints, as in a pipe: nil is an empty line."""
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=WAIT_S_MAX, check=False)
    return (done.stdout + done.stderr).strip()


def test_both_examples_are_cells_of_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(XDG_CACHE_HOME=str(tmp_path / "cache"), TMPDIR=str(tmp_path)).items():
        monkeypatch.setenv(name, value)
    cells = map(nbformat.v4.new_code_cell, [QUICK_START, SEVERAL_STATES, "endpoint.url", "endpoint.stop()"])
    notebook = nbformat.v4.new_notebook(cells=list(cells))  # type: ignore[no-untyped-call]
    kernel = NotebookClient(notebook, timeout=int(WAIT_S_MAX), resources={"metadata": {"path": str(tmp_path)}})
    with kernel.setup_kernel():
        for index in range(3):
            kernel.execute_cell(notebook.cells[index], index)
        [url] = notebook.cells[2].outputs
        with redis.Redis.from_url(url.data["text/plain"].strip("'"), decode_responses=True) as client:
            assert 0 <= float(eventually(lambda: read(client, "sensors:temperature:sensor_1"))) <= 30
            assert int(eventually(lambda: read(client, "all:count:sensor_1"))) > 0
            assert list(client.hgetall("all:latest:sensor_1")) == ["temp", "timestamp"]
            assert 0 < len(client.lrange("recent/sensor_1", 0, -1)) <= 10
            assert 0 < client.ttl("recent/sensor_1") <= 3600
        kernel.execute_cell(notebook.cells[3], 3)


def read(client: redis.Redis, key: str) -> Any:
    """Return the value of a key; None while its job is being opened."""
    try:
        return client.get(key)
    except redis.BusyLoadingError:
        return None
