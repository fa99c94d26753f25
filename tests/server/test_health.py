"""`sparkis health` at real servers: its exit codes, which probes use, among them the image's health check."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compat.conformance.servers import Running, free_port
from compat.waiting import eventually
from resp_server.exporter.listener import MetricsListener
from resp_server.exporter.sources import ServerSource
from tests.builders import put_value, value_state, write_log
from tests.server.conftest import NOW_MS
from tests.server.nodes import HALVES, Nodes


def health(*arguments: str, password: str = "") -> tuple[int, str]:
    """Return the exit code of `sparkis health`, and what is printed."""
    return run("health", *arguments, password=password)


def run(*arguments: str, password: str = "") -> tuple[int, str]:
    """Return the exit code of a command, and what is printed."""
    done = subprocess.run(
        [sys.executable, "-m", "sparkis", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"SPARKIS_PASSWORD": password},
        check=False,
    )
    return done.returncode, (done.stdout + done.stderr).strip()


def url_of(port: int, password: str = "") -> str:
    return f"redis://{password}127.0.0.1:{port}"


def test_server_that_serves_is_healthy(sparkis: Running) -> None:
    assert health("--url", url_of(sparkis.port)) == (0, "")
    assert health("--url", url_of(sparkis.port), "--lag-max", "60") == (0, "")


def test_server_with_password_is_healthy_for_clients_with_it(locked_sparkis: Running) -> None:
    url = url_of(locked_sparkis.port)
    assert health("--url", url, password="s3cret pass") == (0, "")
    assert health("--url", url_of(locked_sparkis.port, ":s3cret%20pass@"), password="wrong") == (0, "")
    code, said = health("--url", url, password="wrong")
    assert code == 1 and "WRONGPASS" in said and "wrong" not in said.replace("WRONGPASS", "")
    code, said = health("--url", url)
    assert code == 1 and said.endswith("wants a password: give it in the URL, or in SPARKIS_PASSWORD")
    assert health("--url", url, "--live") == (0, "")


def test_loading_server_is_alive_and_not_ready(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resp_server.pipeline.loading_waits.LOADING_WAIT_S", 0.05)
    served = serve()
    served.call(lambda: served.server.set_loading(True))
    code, said = health("--url", url_of(served.server.port))
    assert code == 1 and "LOADING" in said
    assert health("--url", url_of(served.server.port), "--live") == (0, "")
    done = subprocess.run(
        [sys.executable, "-m", "sparkis", "status", "--url", url_of(served.server.port)], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith("JOB ")
    assert "loading: commands about keys fail until all jobs are readable" in done.stdout
    served.call(lambda: served.server.set_loading(False))
    assert health("--url", url_of(served.server.port)) == (0, "")


def test_server_whose_job_lags_more_than_it_may_is_not_ready(serve: Callable[..., Any]) -> None:
    served = serve()
    jobs = served.server.context.keyspace.jobs
    behind = replace(jobs["job"], committed_epoch=5, committed_clock_ms=NOW_MS + 7000)
    served.call(lambda: jobs.update(job=behind))
    assert health("--url", url_of(served.server.port)) == (0, "")
    assert health("--url", url_of(served.server.port), "--lag-max", "7") == (0, "")
    code, said = health("--url", url_of(served.server.port), "--lag-max", "6.5")
    assert (code, said) == (1, "sparkis health: job job: 7 s behind")


def test_health_check_of_metrics_needs_no_redis_client(serve: Callable[..., Any]) -> None:
    served = serve(password="secret")
    listener = MetricsListener(ServerSource(served.server), ("127.0.0.1", 0))
    served.run(listener.start())
    try:
        assert health("--metrics", f"127.0.0.1:{listener.port}") == (0, "")
        served.call(listener.drain)
        assert health("--metrics", str(listener.port)) == (1, "sparkis health: draining")
        assert health("--metrics", str(listener.port), "--live") == (0, "")
    finally:
        served.run(listener.stop())


def test_proxy_without_reachable_servers_names_cause_and_remedy(tmp_path: Path) -> None:
    with ExitStack() as stack:
        nodes = Nodes(tmp_path, stack, *HALVES)
        write_log(nodes.log, "job", [value_state("n")], [put_value("n", b"job:n:1", b"1")])
        servers = [nodes.start(number) for number in range(2)]
        proxy = nodes.start_proxy()
        url = url_of(proxy.port)
        eventually(lambda: run("status", "--url", url)[0], lambda code: code == 0)
        for server in servers:
            server.process.kill()
            server.process.wait()
        code, said = run("status", "--url", url)
        assert code == 1
        assert "If this is a proxy, it runs, but a state server behind it is away: start that server" in said
        code, said = health("--url", url, "--lag-max", "60")
        assert code == 1
        assert "cannot be reached" in said or "so the state servers may be away" in said
        assert health("--url", url, "--live") == (0, "")


def test_missing_listener_and_unhealthy_server_have_different_exit_codes() -> None:
    port = free_port()
    code, said = health("--url", url_of(port))
    assert code == 3 and f"cannot connect to 127.0.0.1:{port}" in said
    said = f"sparkis health: cannot connect to 127.0.0.1:{port}: Connection refused"
    assert health("--metrics", str(port)) == (3, said)
    assert health("--metrics", "no port")[0] == health("--lag-max", "-1")[0] == 2
