"""Faults of the log's object store, on a host of its own: it is away, slow, and back again (see test_faults.py)."""

from __future__ import annotations

from tests.hosts.faults import STORE_FAULTS, Fault
from tests.hosts.scene import Scene

FAULTS = STORE_FAULTS  # conftest.py runs the test with each


def test_no_reply_is_wrong_while_logs_store_is_unreachable_and_all_keys_are_current_after_it(
    scene: Scene, fault: Fault
) -> None:
    window = scene.run(fault)
    assert not window.wrong, (window.wrong, scene.output())
    assert not scene.upstream.wrongs, scene.upstream.wrongs[:3]
    assert window.reads
