"""A standby registry takes over when the log's registry has ended, and steps back when that one is restarted."""

from __future__ import annotations

import shutil

import pytest

from compat.waiting import WAIT_S_MAX, eventually
from tests.adversity.fleet import Fleet
from tests.builders import put_value, value_state, write_log


def test_standby_takes_over_from_killed_registry_and_steps_back_when_it_is_restarted(fleet: Fleet) -> None:
    first = fleet.registry()
    standing = fleet.registry("--standby")
    _, second = fleet.halves()
    fleet.wait_until_all_show_it()
    reader = fleet.read()
    assert fleet.record().term == 1

    first.kill()
    eventually(lambda: fleet.record().term == 2, awaited="another one has taken over")
    second.kill()
    fleet.wait_for(_0="0-16383")
    fleet.wait_for_all_keys()

    fleet.registry()
    eventually(lambda: standing.output.count("standing by") == 2, awaited="the standby has stepped back")
    assert fleet.record().term == 3
    fleet.server(1)
    fleet.wait_for(_0="0-8191", _1="8192-16383")
    fleet.wait_until_all_show_it()
    fleet.wait_for_all_keys()
    reader.stop()


def test_standby_ends_if_registry_of_its_record_has_another_log(fleet: Fleet) -> None:
    fleet.registry()
    leftover = fleet.folder / "leftover"
    write_log(leftover, "job", [value_state("n")], [put_value("n", b"job:n:1", b"-1")])
    shutil.copy(fleet.log / "registry.json", leftover)
    standing = fleet.registry("--standby", log=leftover)
    assert standing.popen.wait(WAIT_S_MAX) == 1
    address = fleet.record().address
    assert (
        f"the registry at {address}, which {leftover}/registry.json names, has the log {fleet.log}" in standing.output
    )
    assert f"this standby's log {leftover} has " in standing.output
    assert "Traceback" not in standing.output
    assert fleet.record().term == 1


@pytest.mark.slow
def test_standby_waits_while_registry_answers(fleet: Fleet) -> None:
    fleet.registry()
    standing = fleet.registry("--standby")
    fleet.server(0)
    fleet.wait_for(_0="0-16383")
    # So long that it would have taken over if it had not been answered.
    began = fleet.epoch
    eventually(lambda: fleet.epoch > began + 30, awaited="the job goes on")
    assert fleet.record().term == 1
    assert "started registry" not in standing.output
