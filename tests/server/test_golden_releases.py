"""Files of released versions are read by the programs, and those of newer versions are refused in one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from redis import Redis

from compat.waiting import WAIT_S_MAX, eventually
from resp_server.backends.routing import ownership
from resp_server.programs.state_server import MEMBER_FORMAT
from resp_server.registry import registry_file
from scripts.golden_release import replies, write_part
from state_backend.apply import snapshots
from state_backend.lmdb.record_format import FORMAT
from state_backend.lmdb.store import _boot_id
from state_backend.log.change_log import ChangeLog
from state_backend.model.slot_set import ALL, SlotSet
from tests.golden_releases import NEWER, RELEASES, extracted, raise_format
from tests.server.commands import Command, Start

STARTED = r"started @ 127\.0\.0\.1:(\d+)"


@pytest.fixture(params=RELEASES)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return extracted(request.param, tmp_path)


def remark(stores: Path, change: Callable[[str, str], str]) -> None:
    """Change the mark of all stores: `change(format, version)` is the new one, before the boot's id."""
    for boot in stores.glob("*/*/boot"):
        number, version, _ = boot.read_text().split(" ", 2)
        boot.write_text(f"{change(number, version)} {_boot_id()}")


@pytest.mark.slow
def test_generation_that_is_held_back_is_seen_once_it_is_promoted(start: Start, golden: Path) -> None:
    server = serve(start, golden, "store")
    check(server, golden)
    with Redis(port=int(re.search(STARTED, server.logged)[1]), decode_responses=True, protocol=3) as client:  # type: ignore[index]
        rows = {row["name"]: row for row in client.execute_command("STATE", "JOBS")}
        assert "before" not in rows and rows["renamed"]["keys"] == rows["held"]["keys"] == 30
        assert rows["held"]["held_back_epoch"] == 0
        assert client.get("held:value:1") == "1" and client.get("held:value:new") is None
        promoted = subprocess.run(
            [sys.executable, "-m", "sparkis", "promote", "--log", golden / "log", "held"], check=False
        )
        assert promoted.returncode == 0
        eventually(lambda: (client.get("held:value:new"), client.get("held:value:1")) == ("new", None))


def test_other_half_of_snapshot_completes_it(golden: Path) -> None:
    log = ChangeLog(golden / "log").job("parts")
    current = log.visible()
    assert current is not None and snapshots.newest(log, current) is None
    manifest = write_part(golden / "log", "parts", SlotSet.parse("8192-16383"))
    assert manifest is not None and manifest == snapshots.newest(log, current)
    assert (manifest.epoch, manifest.rows, manifest.slots) == (1, 30, ALL)


def serve(start: Start, golden: Path, store: str) -> Command:
    return start("serve", "--log", golden / "log", "--store", golden / store, "--port", 0, "--compact", "no")


def check(server: Command, golden: Path) -> None:
    """Compare all replies, once all jobs are loaded."""
    found = server.wait_for(STARTED)
    server.logged = found.string
    port = int(found[1])
    with Redis(port=port) as client:
        eventually(lambda: not client.info("persistence")["loading"])
    assert replies(port) == json.loads((golden / "expected.json").read_text())


def test_released_log_is_served_also_from_store_of_that_release(start: Start, golden: Path) -> None:
    check(serve(start, golden, "new"), golden)
    formats = {boot.read_text().split()[0] for boot in (golden / "store").glob("*/*/boot")}
    remark(golden / "store", lambda number, version: f"{number} {version}")
    server = serve(start, golden, "store")
    check(server, golden)
    if formats == {str(FORMAT)}:
        assert "is filled from the log again" not in server.logged


def test_store_of_newer_version_is_refilled_from_log(start: Start, golden: Path) -> None:
    remark(golden / "store", lambda number, version: f"{FORMAT + 1} {NEWER}")
    server = serve(start, golden, "store")
    check(server, golden)
    for _ in (golden / "store").glob("*/*/boot"):
        server.wait_for(
            rf"the store \S+ is filled from the log again: sparkis {NEWER} wrote it in format {FORMAT + 1}, and this "
            rf"one, sparkis \S+, reads format {FORMAT}\n"
        )


def test_registry_and_state_server_continue_with_their_files(start: Start, golden: Path) -> None:
    registry = start("registry", "--log", golden / "log", "--port", 0)
    registry.wait_for(r"started registry @ \S+, term 2")
    member = json.loads((golden / "member/member.json").read_text())
    server = start("state-server", "--log", golden / "log", "--store", golden / "member", "--port", 0)
    server.wait_for(rf"node \S+ \({member['id']}\) of version \d+ of the topology")


def refused(golden: Path, *words: object) -> str:
    """Run a program that refuses to start, and return its only line beside what it does."""
    ended = subprocess.run(
        [sys.executable, "-m", "sparkis", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=WAIT_S_MAX,
        check=False,
        env=os.environ | {"SPARKIS_CONTROL_TOKEN": "of-the-test"},
    )
    assert ended.returncode == 1
    [line] = [line for line in ended.stderr.splitlines() if " INFO " not in line]
    return line


def test_programs_refuse_files_of_newer_versions_in_one_line(golden: Path) -> None:
    log = ("--log", golden / "log")
    with raise_format(golden / "log/registry.json", registry_file.FORMAT) as expected:
        for standby in ((), ("--standby",)):
            assert re.search(expected, refused(golden, "registry", *log, "--port", 0, *standby))
    with raise_format(golden / "member/member.json", MEMBER_FORMAT) as expected:
        server = ("state-server", *log, "--store", golden / "member", "--port", 0)
        assert re.search(expected, refused(golden, *server))
    with raise_format(golden / "owners.json", ownership.FORMAT) as expected:
        upstream = ("--upstream", "redis://127.0.0.1:1", "--ownership", golden / "owners.json", "--port", 0)
        assert re.search(expected, refused(golden, "proxy", *log, *upstream))


def test_owners_of_keys_are_read(golden: Path) -> None:
    owners = ownership.Ownership(golden / "owners.json")
    assert [(job.job, job.status) for job in owners.jobs()] == [("given-back", "released"), ("owned", "owned")]
    assert owners.owner_of(b"owned:s:1") == "owned:s" and owners.owner_of(b"back:1") is None
