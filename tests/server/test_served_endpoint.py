"""The server beside a driver is started again when it dies; if that fails, in peace, and with one word about it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from compat.waiting import eventually
from resp_server.net import children
from spark_hooks.serving import supervised_process
from spark_hooks.serving.supervised_process import SupervisedProcess

# A server that cannot be started while there is a file of this name, and counts how often that was tried.
SERVER = """
import json, os, sys
folder = sys.argv[1]
with open(folder + "/tries", "a") as tries:
    tries.write(".")
if os.path.exists(folder + "/taken"):
    sys.exit("the port is taken")
print(json.dumps({"port": 7, "control_port": 8}), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SupervisedProcess]:
    monkeypatch.setattr(supervised_process, "RESTART_PAUSE_S", 0.001)
    monkeypatch.setattr(supervised_process, "RESTART_PAUSE_S_MAX", 0.01)
    command = [sys.executable, "-c", SERVER, str(tmp_path)]
    made = SupervisedProcess("the sparkis server", command, children.environment())
    yield made
    made.stop()


def tries(folder: Path) -> int:
    return len((folder / "tries").read_text())


def test_server_that_died_is_started_again(server: SupervisedProcess) -> None:
    first = server.pid
    server._process.kill()
    eventually(lambda: server.pid != first)
    assert server._process.poll() is None


def test_server_that_fails_to_restart_is_logged_once_and_returns(
    server: SupervisedProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = server.pid
    (tmp_path / "taken").touch()
    server._process.kill()
    eventually(lambda: tries(tmp_path) >= 5)
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "did not start at port 7; the line above has the reason (is the port in use?)" in errors[0]
    (tmp_path / "taken").unlink()
    eventually(lambda: server.pid != first)


def test_child_with_final_exit_code_is_not_restarted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    command = [sys.executable, "-c", SERVER + "sys.exit(3)", str(tmp_path)]
    child = SupervisedProcess("the server", command, children.environment(), final_exits={3: "another has its place"})
    assert child._process.stdin is not None
    child._process.stdin.close()
    eventually(lambda: not child._monitor.is_alive())
    assert tries(tmp_path) == 1
    assert [record.getMessage() for record in caplog.records] == ["the server has ended: another has its place"]
    child.stop()


def test_nothing_is_started_after_end(server: SupervisedProcess, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    server._process.kill()
    eventually(lambda: tries(tmp_path) >= 2)
    server.stop()
    # Only the monitor starts processes.
    eventually(lambda: not server._monitor.is_alive())
    assert server._process.poll() is not None
