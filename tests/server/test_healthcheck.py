"""The health check of the container's image, at real servers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compat.conformance.servers import Running, free_port

SCRIPT = Path(__file__).parents[2] / "deploy" / "container" / "healthcheck.py"


def check(port: int, password: str = "") -> tuple[int, str]:
    environment = os.environ | {"SPARKIS_PASSWORD": password}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(port)], capture_output=True, text=True, env=environment, check=False
    )
    return done.returncode, done.stderr.strip()


def test_a_server_that_serves_is_healthy(sparkis: Running) -> None:
    assert check(sparkis.port) == (0, "")


def test_a_server_with_a_password_is_healthy_for_who_has_it(locked_sparkis: Running) -> None:
    assert check(locked_sparkis.port, "s3cret pass") == (0, "")
    code, said = check(locked_sparkis.port, "wrong")
    assert code == 1 and said.startswith("AUTH: -WRONGPASS")
    code, said = check(locked_sparkis.port)
    assert code == 1 and said.startswith("PING: -NOAUTH")


def test_a_server_that_loads_its_jobs_is_not_healthy_yet(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resp_server.execution.loading_waits.LOADING_WAIT_S", 0.05)
    served = serve()
    served.call(lambda: served.server.set_loading(True))
    code, said = check(served.server.port)
    assert code == 1 and said.startswith("PING: -LOADING")
    served.call(lambda: served.server.set_loading(False))
    assert check(served.server.port) == (0, "")


def test_a_port_where_nobody_listens_is_not_healthy() -> None:
    code, said = check(free_port())
    assert code == 1 and "refused" in said
