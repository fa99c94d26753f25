"""The example of a declared processor reads the state of its sensors as the processor keeps it."""

from __future__ import annotations

import pytest

from tests.examples.example import run

pytestmark = pytest.mark.spark


@pytest.mark.slow
def test_reader_sees_alert_and_that_silent_sensor_is_removed():
    # The processor's clock is the machine's, what is read is UTC.
    lines = run("temperature_alert", TZ="America/New_York")
    assert "redis-cli -p" in lines[1]
    assert lines[4:] == [
        "08:20  attic 20.375 °C   boiler 58 °C, too hot since 08:16   cellar 12 °C",
        "ALERT  08:26 boiler is at 72.0 °C",
        "08:40  attic 22.875 °C   boiler 98 °C, too hot since 08:16, 1 alert   cellar 12 °C",
        "09:00  attic 25.375 °C   boiler 62 °C, too hot since 08:16, 1 alert   cellar 12 °C",
        "09:20  attic 27.875 °C   boiler 22 °C, 1 alert   cellar 12 °C",
        "09:40  attic 30.375 °C   boiler 20 °C, 1 alert   cellar -",
    ]


def test_help_of_temperature_alert_needs_no_spark():
    assert "queryable_processor" in " ".join(run("temperature_alert", "--help", JAVA_HOME="/nowhere"))
