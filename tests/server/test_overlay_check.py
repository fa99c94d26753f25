"""`sparkis swap-check` at real upstreams of each kind: whose keys are, and the first rules."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from compat.conformance.certificates import Authority
from compat.conformance.servers import Running, child_environment, free_port, redis_server, sparkis_server
from resp_server.backends.routing.rules_file import RulesFile
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from tests.server.overlay import swap_check, tls_options
from tests.server.redis_cluster import RedisCluster
from tests.server.sentinels import Sentinels

STATES = [
    StateDescriptor("speed", key="car", value="kmh"),
    StateDescriptor("apdex", key_format="dash/<account>/apdex", value="score"),
    StateDescriptor("unasked", key="car", value="kmh"),
]
SESSIONS = 40


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("log")
    with LogWriter(root, "job", STATES, "first") as writer:
        writer.publish([Change("speed", Op.PUT, b"job:speed:1", value=b"10")])
    return root


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("upstream")
    with redis_server(folder, "--unixsocket", str(folder / "s")) as server:
        server.folder = folder  # type: ignore[attr-defined]
        fill(server)
        yield server


def fill(server: Running) -> None:
    with server.connect() as client:
        for number in range(SESSIONS):
            client.call("SET", f"session:{number}", "x")
        client.call("MSET", "job:speed:1", "10", "job:speed:2", "20")
        client.call("HSET", "dash/7/apdex", "score", "0.9")


def report(*words: str) -> dict[str, Any]:
    done = swap_check(*words, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def counts(found: dict[str, Any]) -> dict[str, int]:
    return {row["keys"]: row["count"] for row in found["rows"]}


EXPECTED = {
    "job:speed:<car>": 2,
    "dash/<account>/apdex": 1,
    "job:unasked:<car>": 0,
    "session:<a>": SESSIONS,
}


def test_check_shows_owners_and_open_decisions(log: Path, upstream: Running) -> None:
    done = swap_check("--upstream", f"redis://127.0.0.1:{upstream.port}", "--log", str(log))
    assert done.returncode == 0 and done.stderr == "", done.stderr
    first, answered, unasked, stay, decide = done.stdout.split("\n\n")
    assert first == f"127.0.0.1:{upstream.port} has 43 keys; all were read."
    assert [line.split("  ")[0] for line in answered.splitlines()[2:]] == ["job:speed:<car>", "dash/<account>/apdex"]
    assert unasked.splitlines()[-1].split() == ["job:unasked:<car>", "job:unasked", "(string)"]
    assert stay.splitlines()[-1].startswith("session:<a>  40     93.0%  string  session:")
    copies, other = decide.splitlines()[1:]
    assert copies == "- 2 keys job:speed:<car>: from the upstream, as today, or from job:speed."
    assert other.startswith(
        "- 1 key dash/<account>/apdex: 1 of 1 looked at has another type, hash, and job:apdex is a "
    )


def test_check_reads_upstream_at_unix_socket(log: Path, upstream: Running) -> None:
    assert counts(report("--upstream", f"unix://{upstream.folder}/s", "--log", str(log))) == EXPECTED  # type: ignore[attr-defined]


def test_check_reads_cluster_node_by_node(tmp_path: Path, log: Path) -> None:
    with ExitStack() as stack:
        cluster = RedisCluster(tmp_path, stack)
        for name in [*(f"session:{n}" for n in range(SESSIONS)), "job:speed:1", "job:speed:2", "dash/7/apdex"]:
            cluster.call(cluster.master_of(name), "SET", name, "x")
        found = report("--upstream", f"redis+cluster://127.0.0.1:{cluster.nodes[1].port}", "--log", str(log))
    assert counts(found) == EXPECTED
    assert found["is_complete"] and all(row["types"] for row in found["rows"] if row["count"])


def test_check_reads_master_of_sentinels(tmp_path: Path, log: Path) -> None:
    with ExitStack() as stack:
        sentinels = Sentinels(tmp_path, stack)
        fill(sentinels.master)
        assert counts(report("--upstream", sentinels.url, "--log", str(log))) == EXPECTED


def test_check_reads_upstream_with_tls(tmp_path: Path, log: Path) -> None:
    authority, port = Authority(tmp_path / "authority"), free_port()
    authority.issue("upstream", "cache.internal")
    (tmp_path / "upstream").mkdir()
    options = ("--tls-port", str(port), *authority.options("upstream", auth_clients="yes"))
    with redis_server(tmp_path / "upstream", *options, password="secret") as server:
        fill(server)
        words = (*tls_options(authority, "checker"), "--upstream-tls-server-name", "cache.internal")
        found = report("--upstream", f"rediss://:secret@127.0.0.1:{port}", *words, "--log", str(log))
    assert counts(found) == EXPECTED


def test_check_reads_at_most_given_sample(log: Path, tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, server.connect() as client:
        client.call("MSET", *(word for number in range(20_000) for word in (f"session:{number}", "x")))
        found = report("--upstream", f"redis://127.0.0.1:{server.port}", "--log", str(log), "--keys-max", "1500")
    assert found["keys"] == 20_000 and not found["is_complete"] and 1500 <= found["read"] < 4000


def test_check_takes_database_and_rules_of_proxy(log: Path, tmp_path: Path, upstream: Running) -> None:
    with upstream.connect() as client:
        client.call("SELECT", "3")
        client.call("SET", "dash/1/apdex", "1")
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nname = "all"\nkeys = "dash/<any>"\nowner = "upstream"\n')
    words = ("--upstream", f"redis://127.0.0.1:{upstream.port}/3", "--log", str(log), "--routes", str(rules))
    row = next(row for row in report(*words)["rows"] if row["rule"] == "all")
    assert (row["owner"], row["count"], row["state"]) == ("upstream", 1, "job:apdex")
    assert "dash/<any>  upstream  1" in swap_check(*words).stdout


def test_check_asks_servers_for_keys_of_states(log: Path, tmp_path: Path, upstream: Running) -> None:
    with sparkis_server(tmp_path / "store", log) as server:
        words = ("--upstream", f"redis://127.0.0.1:{upstream.port}", "--server", f"redis://127.0.0.1:{server.port}")
        found = report(*words)
    assert counts(found) == EXPECTED
    row = next(row for row in found["rows"] if row["state"] == "job:speed")
    assert (row["compared"], row["absent"]) == (2, 1)
    assert any("job:speed does not have 1 of 2" in each for each in found["decisions"])


def test_check_writes_template_of_rules_once(log: Path, tmp_path: Path, upstream: Running) -> None:
    file = tmp_path / "rules.toml"
    words = ("--upstream", f"redis://127.0.0.1:{upstream.port}", "--log", str(log), "--write-rules", str(file))
    assert swap_check(*words).returncode == 0
    rules = RulesFile(file).read()
    assert {(rule.keys.text, rule.owner.value) for rule in rules} == {
        ("job:speed:<car>", "upstream"),
        ("dash/<account>/apdex", "upstream"),
    }
    again = swap_check(*words)
    assert again.returncode == 1
    assert again.stderr == f"sparkis swap-check: --write-rules: {file} exists; give another name, or remove it\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give the upstream: --upstream URL, or SPARKIS_UPSTREAM in the environment"),
        (("--upstream", "redis://h"), "give the states: --log ROOT, or --server URL"),
        (("--upstream", "http://h", "--log", "/tmp"), "--upstream: an upstream's URL begins with "),
    ],
)
def test_check_reports_mistake_in_one_line(words: tuple[str, ...], said: str, log: Path) -> None:
    if "http://h" in words:
        words = (*words[:-1], str(log))
    done = swap_check(*words)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"sparkis swap-check: {said}")


def test_check_of_absent_upstream_hides_its_password(log: Path) -> None:
    url = f"redis://:secret@127.0.0.1:{free_port()}"
    done = swap_check("--log", str(log), "--upstream-timeout", "300", SPARKIS_UPSTREAM=url)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "cannot be reached" in done.stderr and "secret" not in done.stderr


def test_check_shows_progress_at_terminal(log: Path, upstream: Running) -> None:
    ours, theirs = pty.openpty()
    line = [sys.executable, "-m", "sparkis", "swap-check", "--upstream", f"redis://127.0.0.1:{upstream.port}"]
    done = subprocess.run([*line, "--log", str(log)], env=child_environment(), stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    assert done.returncode == 0
    assert b"[##############################] 43 of 43 keys" in os.read(ours, 65_536)
    os.close(ours)
