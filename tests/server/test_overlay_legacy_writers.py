"""A program that still copies into the upstream, beside a rule with `prefer-state`, is noticed and refused."""

from __future__ import annotations

import subprocess
import sys
import threading

from compat.conformance.wire import Connection
from compat.waiting import WAIT_S_MAX, eventually
from tests.server.swap import Swap, sparkis

PREFERRED = '[[rule]]\nname = "aside"\nkeys = "job:speed:<car>"\nowner = "prefer-state"\n'
RULES = ""  # at first


def test_reload_beside_legacy_writer_is_refused(swap: Swap, client: Connection, direct: Connection) -> None:
    swap.routes.write_text(PREFERRED)
    is_over = threading.Event()

    def copy() -> None:
        while not is_over.wait(0.01):
            direct.call("SET", "job:speed:1", "a copy")

    copier = threading.Thread(target=copy)
    copier.start()
    try:
        refused = client.call("STATE", "RELOAD").plain.decode()
    finally:
        is_over.set()
        copier.join()
    assert refused.startswith(
        "ERR the rules stay as they were: rule 'aside': owner = \"prefer-state\" beside a program"
    )
    assert "'job:speed:1'" in refused and refused.endswith('owner = "state", writes = "pass"')
    assert swap.info()["ownership_rules"] == "0" and swap.info()["upstream_key_changes"] == "off"
    assert client.call("GET", "job:speed:1").plain == b"10"  # the state's


def test_reload_without_legacy_writer_succeeds_and_later_one_is_reported(
    swap: Swap, client: Connection, direct: Connection
) -> None:
    swap.routes.write_text(PREFERRED)
    client.send(b"STATE RELOAD\r\n")
    eventually(lambda: swap.info()["upstream_key_changes"] == "on")
    direct.call("SET", "job:speed:1", "one write is no copier")
    eventually(lambda: swap.info()["copied_writes"] == "1")
    # Keys that the states do not have, and copies that end.
    for _ in range(5):
        direct.call("SET", "job:speed:unknown", "x")
        direct.call("EVAL", "redis.call('set', KEYS[1], 1); redis.call('del', KEYS[1])", 1, "job:speed:2")
    assert client.read().plain == 1
    assert client.call("STATE", "RELOAD").plain == 1  # at once: the rule was watched before
    assert swap.info()["copiers"] == "" and swap.info()["ownership_rules"] == "1"
    for number in range(4, 7):  # a copier starts; it writes through the proxy
        assert client.call("SET", f"job:speed:{number}", "copied").plain == b"OK"
    eventually(lambda: swap.info()["copiers"] == "aside")
    assert client.call("GET", "job:speed:4").plain == b"40"
    found = sparkis(swap.proxy, "reload")
    assert found.returncode == 1 and "beside a program that still writes" in found.stderr


def test_start_and_confirm_beside_legacy_writer_are_refused(swap: Swap, client: Connection, direct: Connection) -> None:
    swap.use_rules(PREFERRED.replace("aside", "beside"))
    is_over = threading.Event()

    def copy() -> None:
        with swap.upstream.connect() as connection:
            while not is_over.wait(0.05):
                connection.call("SET", "job:speed:1", "a copy")

    copier = threading.Thread(target=copy)
    copier.start()
    try:
        eventually(lambda: swap.info()["copiers"] == "beside")
        assert client.call("STATE", "RELEASE", "job").plain
        refused = client.call("STATE", "CONFIRM", "job").plain.decode()
        assert refused.startswith("ERR job 'job' is not confirmed: rule 'beside': owner = \"prefer-state\" beside")
        command = [
            *(sys.executable, "-m", "resp_server.programs.proxy", "--cluster", str(swap.topology), "--port", "0"),
            *("--upstream", f"redis://127.0.0.1:{swap.upstream.port}", "--ownership", str(swap.folder / "other.json")),
            *("--routes", str(swap.routes)),
        ]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S_MAX)
        assert ended.returncode == 1 and "rule 'beside': owner = \"prefer-state\" beside a program" in ended.stderr
        assert ended.stderr.rstrip().endswith("with --copiers report the proxy starts nevertheless")
        reporting = swap.start_at(
            f"redis://127.0.0.1:{swap.upstream.port}", "--routes", str(swap.routes), "--copiers", "report"
        )
        eventually(lambda: swap.info(reporting)["copiers"] == "beside")
    finally:
        is_over.set()
        copier.join()


def test_reload_of_rules_without_states_does_not_wait(swap: Swap, client: Connection) -> None:
    swap.routes.write_text('[[rule]]\nkeys = "cache:<x>"\nowner = "prefer-state"\n')
    assert client.call("STATE", "RELOAD").plain == 1
    assert swap.info()["copiers"] == ""
