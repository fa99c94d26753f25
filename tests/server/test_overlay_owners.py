"""Jobs that are released, and new ones that wait for a confirmation, at a running proxy."""

from __future__ import annotations

import json
from pathlib import Path

from compat.conformance.wire import Connection
from compat.waiting import eventually
from tests.server.overlay import OLD, Overlay, sparkis, start_job


def test_release_gives_keys_to_upstream_and_confirm_takes_them_back(overlay: Overlay, client: Connection) -> None:
    try:
        done = sparkis(overlay.proxy, "release", "job")
        assert done.returncode == 0, done.stderr
        assert done.stdout == "job job: the keys dash/<account>/apdex, job:speed:<car> belong to the upstream\n"
        assert client.call("GET", "job:speed:1").plain == OLD
        assert client.call("SET", "job:speed:9", "mine").plain == b"OK"
        found = client.call("KEYS", "job:speed:*").plain
        assert len(found) == len(set(found)) and b"job:speed:9" in found
        assert overlay.info()["ownership_released"] == "job"
        again = overlay.start_overlay(is_ready=False)
        with again.connect() as other:
            eventually(lambda: other.call("GET", "job:speed:1").plain == OLD)
    finally:
        assert sparkis(overlay.proxy, "confirm", "job").returncode == 0
    assert client.call("GET", "job:speed:1").plain == b"10"
    assert client.call("SET", "job:speed:9", "1").is_error and client.call("EXISTS", "job:speed:9").plain == 0


def test_watch_of_key_with_new_owner_fails_exec(overlay: Overlay, client: Connection) -> None:
    with overlay.proxy.connect() as watcher:
        assert watcher.call("WATCH", "job:speed:1").plain == b"OK"
        client.call("STATE", "RELEASE", "job")
        client.call("STATE", "CONFIRM", "job")
        watcher.call("MULTI")
        watcher.call("GET", "job:speed:2")
        assert watcher.call("EXEC").plain is None
        watcher.call("MULTI")
        watcher.call("GET", "job:speed:2")
        assert watcher.call("EXEC").plain == [b"20"]


def test_watch_of_upstream_key_taken_by_state_fails_exec(overlay: Overlay, client: Connection) -> None:
    with overlay.proxy.connect() as watcher:
        client.call("STATE", "RELEASE", "job")
        try:
            assert watcher.call("WATCH", "job:speed:1").plain == b"OK"
            watcher.call("MULTI")
            assert watcher.call("SET", "written", "1").plain == b"QUEUED"
        finally:
            client.call("STATE", "CONFIRM", "job")
        assert watcher.call("EXEC").plain is None
        assert client.call("EXISTS", "written").plain == 0
        watcher.call("MULTI")
        watcher.call("DEL", "written")
        assert watcher.call("EXEC").plain == [0]


def test_new_job_gets_keys_absent_at_upstream(overlay: Overlay, client: Connection) -> None:
    start_job(overlay, "fresh", "fresh/<day>", "fresh/1")
    eventually(lambda: client.call("GET", "fresh/1").plain == b"of the state")


def test_new_job_waits_for_confirm_if_upstream_has_its_keys(overlay: Overlay, client: Connection) -> None:
    assert client.call("SET", "session:ada", "precious").plain == b"OK"
    start_job(overlay, "greedy", "session:<user>", "session:ada", "session:bob")
    eventually(lambda: overlay.info()["ownership_waiting"] == "greedy")
    assert client.call("GET", "session:ada").plain == b"precious"
    assert client.call("SET", "session:ada", "more").plain == b"OK"
    assert client.call("GET", "session:bob").plain is None
    listed = json.loads(sparkis(overlay.proxy, "owners", "--json").stdout)
    assert {
        "job": "greedy",
        "status": "waiting",
        "key_formats": ["session:<user>"],
        "examples": ["session:ada"],
    } in listed
    lines = sparkis(overlay.proxy, "owners").stdout.splitlines()
    assert [line.split() for line in lines if line.startswith("greedy")] == [
        ["greedy", "waiting", "session:<user>", "session:ada"]
    ]
    assert sparkis(overlay.proxy, "confirm", "greedy").returncode == 0
    # The key's server may read the log later than the one that has told the format.
    eventually(lambda: client.call("GET", "session:ada").plain == b"of the state")
    assert overlay.info()["ownership_waiting"] == ""


def test_new_jobs_take_option_needs_no_confirm(overlay: Overlay) -> None:
    proxy = overlay.start_overlay("--new-jobs", "take")
    with proxy.connect() as client:
        client.call("SET", "taken:1", "precious")
        start_job(overlay, "taker", "taken:<x>", "taken:1")
        eventually(lambda: client.call("GET", "taken:1").plain == b"of the state")


def test_owner_commands_report_mistakes(overlay: Overlay, client: Connection) -> None:
    done = sparkis(overlay.proxy, "release", "nope")
    assert done.returncode == 1 and ": ERR no such job 'nope'; jobs: " in done.stderr
    with overlay.nodes[0].connect() as server:
        assert server.call("STATE", "OWNERS").plain.startswith(b"ERR this is no proxy with an upstream")
    assert client.call("STATE", "CONFIRM").plain.startswith(b"ERR wrong number of arguments")


def test_owner_commands_need_admin(tmp_path: Path, overlay: Overlay) -> None:
    users = tmp_path / "users"
    users.write_text("user default off\nuser app on >app ~* +@all -@admin -@dangerous\nuser boss on >boss ~* +@all\n")
    proxy = overlay.start_overlay("--aclfile", str(users), is_ready=False)
    with proxy.connect() as client:
        client.call("AUTH", "app", "app")
        assert client.call("STATE", "RELEASE", "job").plain.startswith(b"NOPERM")
        assert {b"job"} <= {
            dict(zip(row[::2], row[1::2], strict=True))[b"job"] for row in client.call("STATE", "OWNERS").plain
        }
        client.call("AUTH", "boss", "boss")
        assert client.call("STATE", "CONFIRM", "job").plain == [b"dash/<account>/apdex", b"job:speed:<car>"]
