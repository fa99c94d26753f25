"""A state server whose --log leads to another log than the registry's gets no slots, and answers nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from redis.exceptions import MovedError

from compat.conformance.servers import child_environment, sparkis_program
from compat.waiting import eventually
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from tests.adversity.fleet import JOB, KEYS, TOKEN, Fleet

STATE = StateDescriptor("n", key="k", value="v")
REFUSED = "refuses this server"
PROXY = ("-m", "resp_server.programs.proxy")


def other_log(fleet: Fleet, kind: str) -> Path:
    """Return a folder that is not the fleet's log."""
    folder = fleet.folder / kind
    if kind == "copy that was written":
        eventually(lambda: fleet.epoch > 3, awaited="the log has epochs")
        shutil.copytree(fleet.log, folder, ignore=shutil.ignore_patterns("*.tmp"))  # it is being written
    folder.mkdir(exist_ok=True)
    if kind != "unmounted":
        with LogWriter(folder, JOB, [STATE], takeover=True) as writer:
            for _ in range(20):
                writer.publish([Change("n", Op.PUT, key.encode(), value=b"-1") for key in KEYS])
    return folder


@pytest.mark.parametrize(
    "kind", ["unmounted", pytest.param("leftover", marks=pytest.mark.slow), "copy that was written"]
)
def test_server_of_another_log_owns_nothing_and_answers_nothing(fleet: Fleet, kind: str) -> None:
    fleet.registry()
    fleet.server(0)
    fleet.wait_for(_0="0-16383")
    reader = fleet.read()
    wrong = fleet.server(1, "--registry", fleet.record().address, log=other_log(fleet, kind))
    eventually(lambda: REFUSED in wrong.output, awaited="the refusal is logged")
    since = fleet.epoch
    eventually(lambda: fleet.epoch > since + 15, awaited="the job goes on")
    assert {number: slots for number, (_, slots, _) in fleet.nodes().items()} == {0: "0-16383"}
    # It may know the topology from the time before it was found out.
    with redis.Redis(port=wrong.port) as client, pytest.raises((redis.BusyLoadingError, MovedError)):
        client.get(KEYS[0])
    assert wrong.output.count(REFUSED) == 1
    fleet.wait_for_all_keys()
    reader.stop()


def test_member_with_another_log_answers_nothing_until_it_has_its_own(fleet: Fleet) -> None:
    fleet.registry()
    mounted = fleet.folder / "mounted"
    mounted.symlink_to(fleet.log)
    fleet.server(0)
    fleet.wait_for(_0="0-16383")
    second = fleet.server(1, log=mounted)
    fleet.wait_for(_0="0-8191", _1="8192-16383")
    leftover = other_log(fleet, "leftover")
    mounted.unlink()
    mounted.symlink_to(leftover)
    eventually(lambda: REFUSED in second.output, awaited="the refusal is logged")
    fleet.wait_for(_0="0-16383")
    fleet.wait_for_all_keys()
    mounted.unlink()
    mounted.symlink_to(fleet.log)
    fleet.wait_for(_0="0-8191", _1="8192-16383")
    fleet.wait_for_all_keys()


@pytest.mark.parametrize("program", ["serve", "state-server"])
def test_server_whose_store_was_filled_from_another_log_does_not_start(fleet: Fleet, program: str) -> None:
    fleet.registry()
    fleet.server(0)
    fleet.wait_for(_0="0-16383")
    fleet.servers[0].kill()
    other, store = other_log(fleet, "leftover"), fleet.folder / "store0"
    command = [sys.executable, "-m", "sparkis", program, "--log", str(other), "--store", str(store), "--port", "0"]
    ended = subprocess.run(
        command, env=child_environment() | {"SPARKIS_CONTROL_TOKEN": TOKEN}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert f"the store {store} was filled from the log {fleet.log} (identity " in ended.stderr
    assert f"and is given for the log {other} (" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_proxy_answers_nothing_from_servers_of_another_log_than_its_own(fleet: Fleet) -> None:
    fleet.registry()
    server = fleet.server(0)
    fleet.wait_for(_0="0-16383")
    leftover = other_log(fleet, "leftover")
    shutil.copy(fleet.log / "registry.json", leftover)
    with sparkis_program(PROXY, "--port", "0", "--log", str(leftover)) as proxy, proxy.connect() as client:
        refusal = f"127.0.0.1:{server.port} cannot be reached: it serves the log {fleet.log} (identity "
        eventually(lambda: str(client.call("GET", KEYS[0])), lambda found: refusal in found)
        error = client.call("GET", KEYS[0])
        assert error.is_error
        assert f"the proxy's --log is {leftover} (" in str(error)
        assert all(client.call("GET", key).is_error for key in KEYS[:20])
    with sparkis_program(PROXY, "--port", "0", "--log", str(fleet.log)) as proxy, proxy.connect() as client:
        eventually(lambda: not client.call("GET", KEYS[0]).is_error, awaited="a value")


def test_proxy_takes_servers_of_older_version_that_report_no_log(fleet: Fleet) -> None:
    (fleet.log / "log.json").rename(fleet.folder / "identity")
    fleet.registry()
    fleet.server(0)
    with sparkis_program(PROXY, "--port", "0", "--log", str(fleet.log)) as proxy, proxy.connect() as client:
        eventually(lambda: not client.call("GET", KEYS[0]).is_error, awaited="a value")
        (fleet.folder / "identity").rename(fleet.log / "log.json")
        since = fleet.epoch
        eventually(lambda: fleet.epoch > since + 10, awaited="the job goes on")
        assert not client.call("GET", KEYS[0]).is_error
