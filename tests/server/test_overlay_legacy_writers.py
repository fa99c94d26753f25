"""A program that still copies into the upstream, beside a rule with `prefer-state`, is noticed and refused."""

from __future__ import annotations

import subprocess
import sys

from compat.conformance.wire import Connection
from compat.waiting import WAIT_S_MAX, eventually
from tests.meanwhile import meanwhile, repeated
from tests.server.overlay import Overlay, sparkis

PREFERRED = '[[rule]]\nname = "aside"\nkeys = "job:speed:<car>"\nowner = "prefer-state"\n'
RULES = ""  # at first


def test_reload_beside_legacy_writer_is_refused(overlay: Overlay, client: Connection, direct: Connection) -> None:
    overlay.routes.write_text(PREFERRED)
    with meanwhile(repeated(lambda: direct.call("SET", "job:speed:1", "a copy"), 0.01)):
        refused = client.call("STATE", "RELOAD").plain.decode()
    assert refused.startswith(
        "ERR the rules stay as they were: rule 'aside': owner = \"prefer-state\" beside a program"
    )
    assert "'job:speed:1'" in refused and refused.endswith('owner = "state", writes = "pass"')
    assert overlay.info()["ownership_rules"] == "0" and overlay.info()["upstream_key_changes"] == "off"
    assert client.call("GET", "job:speed:1").plain == b"10"  # the state's


def test_reload_without_legacy_writer_succeeds_and_later_one_is_reported(
    overlay: Overlay, client: Connection, direct: Connection
) -> None:
    overlay.routes.write_text(PREFERRED)
    client.send(b"STATE RELOAD\r\n")
    eventually(lambda: overlay.info()["upstream_key_changes"] == "on")
    direct.call("SET", "job:speed:1", "one write is no copier")
    eventually(lambda: overlay.info()["copied_writes"] == "1")
    # Keys that the states do not have, and copies that end.
    for _ in range(5):
        direct.call("SET", "job:speed:unknown", "x")
        direct.call("EVAL", "redis.call('set', KEYS[1], 1); redis.call('del', KEYS[1])", 1, "job:speed:2")
    assert client.read().plain == 1
    assert client.call("STATE", "RELOAD").plain == 1  # at once: the rule was watched before
    assert overlay.info()["copiers"] == "" and overlay.info()["ownership_rules"] == "1"
    for number in range(4, 7):  # a copier starts; it writes through the proxy
        assert client.call("SET", f"job:speed:{number}", "copied").plain == b"OK"
    eventually(lambda: overlay.info()["copiers"] == "aside")
    assert client.call("GET", "job:speed:4").plain == b"40"
    found = sparkis(overlay.proxy, "reload")
    assert found.returncode == 1 and "beside a program that still writes" in found.stderr


def test_start_beside_legacy_writer_is_refused(overlay: Overlay, client: Connection, direct: Connection) -> None:
    overlay.use_rules(PREFERRED.replace("aside", "beside"))
    with meanwhile(repeated(lambda: direct.call("SET", "job:speed:1", "a copy"), 0.05)):
        eventually(lambda: overlay.info()["copiers"] == "beside")
        assert client.call("STATE", "RELEASE", "job").plain
        refused = client.call("STATE", "CONFIRM", "job").plain.decode()
        assert refused.startswith("ERR job 'job' is not confirmed: rule 'beside': owner = \"prefer-state\" beside")
        command = [
            sys.executable,
            "-m",
            "resp_server.programs.proxy",
            "--cluster",
            str(overlay.topology),
            "--port",
            "0",
        ]
        upstream = ["--upstream", f"redis://127.0.0.1:{overlay.upstream.port}", "--routes", str(overlay.routes)]
        command += [*upstream, "--ownership", str(overlay.folder / "other.json")]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S_MAX)
        assert ended.returncode == 1 and "rule 'beside': owner = \"prefer-state\" beside a program" in ended.stderr
        assert ended.stderr.rstrip().endswith("with --copiers report the proxy starts nevertheless")
        reporting = overlay.start_at(
            f"redis://127.0.0.1:{overlay.upstream.port}", "--routes", str(overlay.routes), "--copiers", "report"
        )
        eventually(lambda: overlay.info(reporting)["copiers"] == "beside")


def test_reload_of_rules_without_states_does_not_wait(overlay: Overlay, client: Connection) -> None:
    overlay.routes.write_text('[[rule]]\nkeys = "cache:<x>"\nowner = "prefer-state"\n')
    assert client.call("STATE", "RELOAD").plain == 1
    assert overlay.info()["copiers"] == ""
