"""The example of a declared processor, run as its readers run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.spark

EXAMPLE = Path(__file__).parents[2] / "examples" / "temperature_alert.py"
TIMEOUT_S = 300


def run(*arguments: str, timezone: str = "UTC") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TZ": timezone}
    command = [sys.executable, str(EXAMPLE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S, check=False)


def test_a_reader_sees_the_alert_and_the_silent_sensor_goes():
    ran = run(timezone="America/New_York")  # the processor's clock is the machine's, the state's is UTC
    assert ran.returncode == 0, ran.stderr
    head, lines = ran.stdout.splitlines()[:4], ran.stdout.splitlines()[4:]
    assert "redis-cli -p" in head[1]
    assert lines == [
        "08:20  attic 20.375 °C   boiler 58 °C, too hot since 08:16   cellar 12 °C",
        "ALERT  08:26 boiler is at 72.0 °C",
        "08:40  attic 22.875 °C   boiler 98 °C, too hot since 08:16, 1 alert   cellar 12 °C",
        "09:00  attic 25.375 °C   boiler 62 °C, too hot since 08:16, 1 alert   cellar 12 °C",
        "09:20  attic 27.875 °C   boiler 22 °C, 1 alert   cellar 12 °C",
        "09:40  attic 30.375 °C   boiler 20 °C, 1 alert   cellar -",
    ]


def test_it_says_what_it_is_and_takes_without_spark():
    ran = run("--help")
    assert ran.returncode == 0, ran.stderr
    assert "--limit" in ran.stdout
    assert "sparkis.queryable_processor" in ran.stdout
