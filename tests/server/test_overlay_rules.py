"""The rules file of a proxy with an upstream: read at the start, and again while it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from compat.conformance.servers import child_environment
from compat.conformance.wire import Connection
from compat.waiting import eventually
from tests.server.overlay import OLD, Overlay, sparkis, start_job

RULES = """
[[rule]]
name = "two"
keys = "job:speed:2"
owner = "upstream"

[[rule]]
keys = "extra:<x>"
owner = "state"
"""


@pytest.fixture(autouse=True)
def _rules_as_before(overlay: Overlay) -> Iterator[None]:
    yield
    overlay.use_rules(RULES)


def test_rules_override_key_formats(client: Connection) -> None:
    assert client.call("MGET", "job:speed:1", "job:speed:2").plain == [b"10", OLD]
    assert client.call("SET", "job:speed:2", OLD).plain == b"OK"
    assert client.call("GET", "extra:1").plain is None
    assert client.call("SET", "extra:1", "x").plain == b"ERR key 'extra:1' is the states', by the rule 'extra:<x>'"
    assert client.call("SET", "job:speed:1", "x").plain == b"ERR key 'job:speed:1' is owned by state job:speed"
    assert client.call("SUNION", "job:speed:1", "job:speed:2").plain == (
        b"ERR command 'sunion' needs keys of one backend: key 'job:speed:1' is owned by state job:speed, "
        b"key 'job:speed:2' is the upstream's"
    )


def test_reload_changes_owners_and_fails_exec_of_watchers(overlay: Overlay, client: Connection) -> None:
    with overlay.proxy.connect() as watcher:
        assert watcher.call("WATCH", "job:speed:1").plain == b"OK"
        overlay.routes.write_text('[[rule]]\nkeys = "job:speed:1"\nowner = "upstream"\n')
        done = sparkis(overlay.proxy, "reload")
        assert (done.returncode, done.stdout) == (0, "1 rule\n"), done.stderr
        assert client.call("MGET", "job:speed:1", "job:speed:2").plain == [OLD, b"20"]
        watcher.call("MULTI")
        watcher.call("GET", "job:speed:3")
        assert watcher.call("EXEC").plain is None
    assert overlay.info()["ownership_rules"] == "1"


def test_reload_with_mistakes_changes_nothing_and_reports_all(overlay: Overlay, client: Connection) -> None:
    overlay.routes.write_text('[[rule]]\nkeys = "job:<x>"\nowner = "upstream"\n[[rule]]\nkeys = "a*"\n')
    done = sparkis(overlay.proxy, "reload")
    assert done.returncode == 1
    for mistake in ("rule 2 'a*' (line 4): keys 'a*' has a '*'", "rule 2 'a*' (line 4): it has no 'owner'"):
        assert mistake in done.stderr
    assert "the rules stay as they were: " in done.stderr and " has 2 mistakes: " in done.stderr
    assert client.call("MGET", "job:speed:1", "job:speed:2").plain == [b"10", OLD]


def test_sighup_reloads_rules(overlay: Overlay, client: Connection) -> None:
    overlay.routes.write_text('[[rule]]\nkeys = "a*"\n')
    os.kill(overlay.proxy.process.pid, signal.SIGHUP)
    overlay.routes.write_text("")
    os.kill(overlay.proxy.process.pid, signal.SIGHUP)
    eventually(lambda: client.call("GET", "job:speed:2").plain == b"20")


def test_rule_decides_new_job_without_confirm(overlay: Overlay, client: Connection) -> None:
    client.call("SET", "session:ada", "precious")
    start_job(overlay, "greedy", "session:<user>", "session:ada")
    eventually(lambda: overlay.info()["ownership_waiting"] == "greedy")
    overlay.routes.write_text('[[rule]]\nkeys = "session:<user>"\nowner = "state"\n')
    assert client.call("STATE", "RELOAD").plain == 1
    # The server of this key may open the job later than the one that announced the job.
    eventually(lambda: client.call("GET", "session:ada").plain == b"of the state")
    assert overlay.info()["ownership_waiting"] == ""


def test_reload_needs_admin_and_rules(tmp_path: Path, overlay: Overlay) -> None:
    users = tmp_path / "users"
    users.write_text("user default off\nuser app on >app ~* +@all -@admin\nuser boss on >boss ~* +@all\n")
    proxy = overlay.start_overlay("--aclfile", str(users), is_ready=False)
    with proxy.connect() as client:
        client.call("AUTH", "app", "app")
        assert client.call("STATE", "RELOAD").plain.startswith(b"NOPERM")
        client.call("AUTH", "boss", "boss")
        assert client.call("STATE", "RELOAD").plain == (
            b"ERR this proxy has no rules file: start it with --routes FILE"
        )


def test_start_with_mistakes_in_rules_fails(tmp_path: Path, overlay: Overlay) -> None:
    path = tmp_path / "routes.toml"
    path.write_text('[[rule]]\nkeys = "a"\nowner = "x"\n[[rule]]\nkeys = "b"\n')
    program = "import sys; from spark_hooks.cli import main; sys.exit(main())"
    line = [sys.executable, "-c", program, "proxy", "--log", str(overlay.log), "--port", "0", "--routes", str(path)]
    upstream = ["--upstream", "redis://127.0.0.1:1", "--ownership", str(tmp_path / "owners.json")]
    done = subprocess.run(line + upstream, env=child_environment(), capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "rule 1 'a' (line 1): owner is 'x'" in done.stderr
    assert "rule 2 'b' (line 4): it has no 'owner'" in done.stderr
    alone = subprocess.run(line, env=child_environment(), capture_output=True, text=True, check=False)
    assert alone.returncode != 0 and "--routes has no use without --upstream" in alone.stderr


def test_writes_rule_drops_or_passes_writes(overlay: Overlay, client: Connection) -> None:
    overlay.routes.write_text(
        '[[rule]]\nkeys = "job:speed:1"\nowner = "state"\nwrites = "drop"\n'
        '[[rule]]\nkeys = "job:speed:3"\nowner = "state"\nwrites = "pass"\n'
    )
    assert client.call("STATE", "RELOAD").plain == 2
    before = int(overlay.info()["dropped_writes"])
    for line in ("SET job:speed:1 x", "SETEX job:speed:1 9 x", "MSET job:speed:1 x a new job:speed:3 new"):
        assert client.call(*line.split(" ")).plain == b"OK"
    assert client.call("MGET", "a", "job:speed:1", "job:speed:3").plain == [b"new", b"10", b"30"]
    with overlay.upstream.connect() as upstream:
        assert upstream.call("MGET", "a", "job:speed:1", "job:speed:3").plain == [b"new", OLD, b"new"]
    for line in ("MSET a newer job:speed:1 x job:speed:4 x", "DEL a job:speed:1"):
        assert client.call(*line.split(" ")).is_error
    assert client.call("GET", "a").plain == b"new"
    client.send(b"CLIENT REPLY OFF\r\nSET job:speed:1 x\r\nCLIENT REPLY ON\r\nSET job:speed:1 x\r\n")
    assert [client.read().plain, client.read().plain] == [b"OK", b"OK"]
    assert int(overlay.info()["dropped_writes"]) == before + 4  # an MSET with a key that is not dropped is sent
