"""State servers that share the slots come, go, hang and are killed while cluster clients read: no answer is wrong."""

from __future__ import annotations

import json
import os
import resource
import signal

import pytest
from redis import Redis

from compat.waiting import WAIT_S_MAX, eventually
from resp_server.programs.registry import FENCED_CODE
from tests.adversity.fleet import KEYS, Fleet
from tests.adversity.scene import children_of

# Less than any store needs for its next epoch.
FULL_BYTES = 16 << 10
THIRDS = {"_0": "0-5461", "_1": "10923-16383", "_2": "5462-10922"}


def test_servers_join_and_leave_under_load_and_no_read_fails(fleet: Fleet) -> None:
    fleet.registry()
    fleet.server(0)
    fleet.wait_for(_0="0-16383")
    reader = fleet.read()
    fleet.server(1)
    fleet.wait_for(_0="0-8191", _1="8192-16383")
    third = fleet.server(2)
    fleet.wait_for(**THIRDS)
    fleet.wait_until_all_show_it()
    fleet.wait_for_all_keys()
    third.popen.send_signal(signal.SIGTERM)
    assert third.popen.wait() == 0
    fleet.wait_for(_0="0-8191", _1="8192-16383")
    fleet.wait_until_all_show_it()
    fleet.wait_for_all_keys()
    reader.stop()
    assert not reader.failures


def test_servers_of_ending_driver_hand_over_without_failed_reads(fleet: Fleet) -> None:
    registry = fleet.registry()
    placed = [fleet.server(0, "--driver", "mine")]
    fleet.wait_for(_0="0-16383")
    placed.append(fleet.server(1, "--driver", "mine"))
    fleet.wait_for(_0="0-8191", _1="8192-16383")
    fleet.server(2)
    fleet.wait_for(**THIRDS)
    fleet.wait_until_all_show_it()
    fleet.wait_for_all_keys()
    reader = fleet.read()
    eventually(lambda: reader.reads > 100, awaited="a hundred reads")
    with fleet.ask() as driver:
        assert driver.call("END", "mine", timeout_s=WAIT_S_MAX) == "OK"
    assert [each.popen.wait() for each in placed] == [0, 0]
    assert registry.popen.stdin is not None
    registry.popen.stdin.close()
    assert registry.popen.wait() == 0
    before = fleet.record()
    assert before.topology is not None
    assert {number: slots for number, (_, slots, _) in fleet.nodes().items() if slots} == {2: "0-16383"}
    fleet.wait_for_all_keys()

    fleet.registry("--standby")
    eventually(lambda: fleet.record().term == 2, awaited="another one has taken over")
    fleet.wait_for(_2="0-16383")
    fleet.wait_until_all_show_it()
    fleet.wait_for_all_keys()
    reader.stop()
    assert not reader.failures


def test_replica_takes_place_of_master_that_is_killed(doubled: Fleet) -> None:
    doubled.registry()
    first = doubled.server(0)
    doubled.wait_for(_0="0-16383")
    doubled.server(1)
    doubled.wait_for(_0="0-16383", _1="replica")
    reader = doubled.read()
    eventually(lambda: reader.reads > 100, awaited="a hundred reads")
    first.kill()
    doubled.wait_for(_1="0-16383")
    assert doubled.nodes()[0] == ("replica", "", "fail")
    doubled.wait_for_all_keys()
    doubled.server(0)
    doubled.wait_for(_1="0-16383", _0="replica")
    doubled.wait_until_all_show_it()
    reader.stop()


@pytest.mark.slow
def test_killed_server_that_is_started_again_has_its_slots_as_before(fleet: Fleet) -> None:
    fleet.registry()
    _, second = fleet.halves()
    reader = fleet.read()
    second.kill()
    fleet.server(1)
    fleet.wait_for(_0="0-8191", _1="8192-16383")
    fleet.wait_until_all_show_it()
    fleet.wait_for_all_keys()
    reader.stop()


def test_slots_of_killed_server_are_loaded_by_others(fleet: Fleet) -> None:
    fleet.registry()
    _, second = fleet.halves()
    fleet.wait_until_all_show_it()
    reader = fleet.read()
    second.kill()
    fleet.wait_for(_0="0-16383")
    fleet.wait_for_all_keys()
    eventually(lambda: list(fleet.nodes()) == [0], awaited="the registry forgets the server")
    reader.stop()


def test_slots_of_server_with_full_disk_are_taken_over(fleet: Fleet) -> None:
    fleet.registry()
    _, second = fleet.halves()
    fleet.wait_until_all_show_it()
    reader = fleet.read()
    (applier,) = children_of(second.popen.pid, "state_backend.apply.applier")
    _, hard = resource.prlimit(applier, resource.RLIMIT_FSIZE)
    resource.prlimit(applier, resource.RLIMIT_FSIZE, (FULL_BYTES, hard))
    fleet.wait_for(_0="0-16383", _1="")
    fleet.wait_for_all_keys()
    reader.stop()
    assert not reader.failures


@pytest.mark.slow
def test_hanging_server_is_left_out_and_taken_back(fleet: Fleet) -> None:
    fleet.registry(program=("-m", "resp_server.programs.registry"))
    _, second = fleet.halves()
    second.popen.send_signal(signal.SIGSTOP)
    try:
        fleet.wait_for(_0="0-16383")
    finally:
        second.popen.send_signal(signal.SIGCONT)
    fleet.wait_for(_0="0-8191", _1="8192-16383")
    fleet.wait_until_all_show_it()
    fleet.wait_for_all_keys()


def test_servers_continue_without_registry_and_next_registry_takes_over(fleet: Fleet) -> None:
    registry = fleet.registry()
    _, second = fleet.halves()
    fleet.wait_until_all_show_it()
    reader = fleet.read()
    registry.kill()
    fleet.wait_for_all_keys()
    assert not reader.failures
    before = fleet.record()
    assert before.topology is not None
    second.kill()
    second = fleet.server(1)  # nobody is there to tell it what to serve: it reads what was written down
    fleet.wait_for_all_keys()
    reader.failures.clear()
    fleet.registry()
    eventually(lambda: fleet.record().topology != before.topology, awaited="a version of the new registry")
    after = fleet.record()
    assert after.topology is not None
    assert (after.term, after.topology.version) == (before.term + 1, before.topology.version + 1)
    fleet.wait_for(_0="0-8191", _1="8192-16383")
    fleet.wait_until_all_show_it()
    fleet.wait_for_all_keys()
    reader.stop()
    assert not reader.failures


@pytest.mark.slow
def test_hanging_registry_fails_no_read_and_moves_no_slots_afterwards(fleet: Fleet) -> None:
    registry = fleet.registry()
    fleet.halves()
    fleet.wait_until_all_show_it()
    reader = fleet.read()
    registry.popen.send_signal(signal.SIGSTOP)
    try:
        epoch = fleet.epoch
        eventually(
            lambda: all("; still serving clients" in each.output for each in fleet.servers),
            awaited="the servers log that they serve on",
        )
        eventually(lambda: fleet.epoch > epoch + 5, awaited="epochs go on")
    finally:
        registry.popen.send_signal(signal.SIGCONT)
    fleet.wait_for_all_keys()
    fleet.wait_until_all_show_it()
    fleet.wait_for(_0="0-8191", _1="8192-16383")
    assert "desired slots: 0-16383" not in fleet.servers[1].output
    reader.stop()
    assert not reader.failures


@pytest.mark.slow
def test_older_of_two_registries_ends(fleet: Fleet) -> None:
    older = fleet.registry()
    fleet.server(0)
    fleet.wait_for(_0="0-16383")
    reader = fleet.read()
    fleet.registry()
    assert older.popen.wait(30) == FENCED_CODE
    assert "has taken over with term 2; this one has 1" in older.output
    fleet.server(1)
    fleet.wait_for(_0="0-8191", _1="8192-16383")
    fleet.wait_until_all_show_it()
    reader.stop()
    assert not reader.failures


@pytest.mark.slow
def test_registry_that_has_lost_its_record_learns_from_servers(fleet: Fleet) -> None:
    registry = fleet.registry()
    fleet.halves()
    fleet.wait_until_all_show_it()
    version = fleet.record().topology.version  # type: ignore[union-attr]
    reader = fleet.read()
    registry.kill()
    os.remove(fleet.log / "registry.json")
    fleet.registry()
    eventually(lambda: fleet.record().topology, awaited="the record has a topology")
    assert fleet.record().topology.version == version + 1  # type: ignore[union-attr]
    fleet.wait_for(_0="0-8191", _1="8192-16383")
    reader.stop()
    assert not reader.failures


def test_server_replies_loading_until_slots_are_assigned(fleet: Fleet) -> None:
    server = fleet.server(0)
    with Redis(port=server.port, retry=None) as client:  # type: ignore[arg-type]
        with pytest.raises(Exception, match="loading the dataset"):
            client.get(KEYS[0])
        assert client.info()["loading"] == 1
        fleet.registry()
        eventually(lambda: _get(client), awaited="an answer")


def _get(client: Redis) -> bytes | None:
    try:
        found = client.get(KEYS[0])
        assert found is not None
        return found  # type: ignore[return-value]
    except Exception as error:
        assert not isinstance(error, AssertionError)
        return None


def test_server_keeps_its_identity_in_its_store_folder(fleet: Fleet) -> None:
    first = fleet.server(0)
    stored = json.loads((fleet.folder / "store0" / "member.json").read_text())
    assert stored["port"] == first.port
    first.popen.send_signal(signal.SIGTERM)
    assert first.popen.wait() == 0  # at once: there is nobody to wait for
    fleet.server(0)
    assert json.loads((fleet.folder / "store0" / "member.json").read_text()) == stored
