"""The dashboard shows five sensors, through redis-py and through nothing but redis-cli."""

from __future__ import annotations

import re
import signal
import subprocess

import pytest

from compat.waiting import WAIT_S_MAX
from tests.examples.example import ROOT, command, environment

pytestmark = pytest.mark.spark


@pytest.mark.slow
def test_five_sensors_by_redis_py_and_by_redis_cli_while_job_runs():
    job = subprocess.Popen(
        command("dashboard", "--rounds", "0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        assert job.stdout is not None and job.stderr is not None
        line_of_dashboard = next((line for line in job.stderr if "dashboard.sh" in line), "")
        port = line_of_dashboard.split()[-1]
        assert re.fullmatch(r"(sensor_[1-5] +-?\d+(\.\d)? *){5}", job.stdout.readline().strip() + " ")

        script = ["sh", str(ROOT / "examples" / "dashboard.sh"), port, "2"]
        by_cli = subprocess.run(script, capture_output=True, text=True, timeout=WAIT_S_MAX, check=True)
        assert len(re.findall(r"^-?\d+(?:\.\d)?$", by_cli.stdout, re.MULTILINE)) == 10

        beside = [*command("dashboard", "--url", f"redis://127.0.0.1:{port}", "--rounds", "2")]
        shown = subprocess.run(
            beside, capture_output=True, text=True, timeout=WAIT_S_MAX, env=environment(), check=True
        )
        assert len(shown.stdout.splitlines()) == 2
        assert "starting Spark" not in shown.stderr
    finally:
        job.send_signal(signal.SIGINT)  # Ctrl-C: an orderly end, after which the job's server is gone, too
        job.communicate(timeout=WAIT_S_MAX)


def test_missing_server_is_one_line():
    asked = command("dashboard", "--url", "redis://127.0.0.1:1", "--rounds", "1")
    done = subprocess.run(asked, capture_output=True, text=True, timeout=WAIT_S_MAX, env=environment(), check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("dashboard: ")
    assert len(done.stderr.splitlines()) == 1
