"""Two appliers of one log exchange slots: the content of owned slots always equals the log."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from compat.examples import examples
from tests.properties.slots_moves import SlotsMove

TestSlotsMove = SlotsMove.TestCase
TestSlotsMove.settings = settings(
    max_examples=examples(2), stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
