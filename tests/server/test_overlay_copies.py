"""`sparkis swap-check --delete-copies`: old copies go, and no other key does; the way back still works."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from compat.conformance.servers import child_environment, free_port, redis_server, sparkis_proxy
from compat.conformance.wire import Connection
from compat.waiting import eventually
from tests.server.overlay import ABSENT, OLD, VALUES, Overlay, delete_copies, sparkis, swap_check
from tests.server.redis_cluster import RedisCluster

OTHERS = {b"session:1": b"mine", b"dash/7": b"mine", b"job:speed": b"mine", b"dash/7/apdex/old": b"mine"}
COPIES = [*VALUES, ABSENT]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Overlay]:
    with ExitStack() as stack:
        yield Overlay(tmp_path_factory.mktemp("overlay"), stack)


@pytest.fixture
def overlay(shared: Overlay) -> Overlay:
    """The module's proxy; its upstream has the copies and the other keys, and the states own theirs."""
    with shared.upstream.connect() as upstream, shared.proxy.connect() as client:
        upstream.call("FLUSHALL")
        pairs = [*((key, OLD) for key in COPIES), *OTHERS.items()]
        upstream.call("MSET", *(word for pair in pairs for word in pair))
        client.call("STATE", "CONFIRM", "job")
    return shared


@pytest.fixture
def upstream(overlay: Overlay) -> Iterator[Connection]:
    with overlay.upstream.connect() as connection:
        yield connection


def test_delete_removes_copies_and_no_other_keys(overlay: Overlay, upstream: Connection) -> None:
    done = delete_copies(overlay, "--yes")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    first, heading, apdex, speed, last = done.stdout.splitlines()
    assert first == f"127.0.0.1:{overlay.upstream_port} has old copies of keys that states own:"
    assert heading.split() == ["STATE", "COPIES", "EXAMPLES"]
    assert apdex.split() == ["job:apdex", "1", "dash/7/apdex"] and speed.startswith("job:speed  9       job:speed:")
    assert last == "10 copies deleted."
    assert sorted(upstream.call("KEYS", "*").plain) == sorted(OTHERS)
    with overlay.proxy.connect() as client:
        assert [client.call("GET", key).plain for key in VALUES] == list(VALUES.values())
        assert client.call("GET", ABSENT).plain is None
    assert delete_copies(overlay, "--yes").stdout == (
        f"127.0.0.1:{overlay.upstream_port} has no old copies of keys that states own.\n"
    )


def test_interrupted_delete_reports_progress_and_can_run_again(overlay: Overlay, upstream: Connection) -> None:
    copies = [b"job:speed:copy%d" % number for number in range(20_000)]
    upstream.call("MSET", *(word for key in copies for word in (key, OLD)))
    found = upstream.call("DBSIZE").plain
    addresses = (
        "--upstream",
        f"redis://127.0.0.1:{overlay.upstream_port}",
        "--proxy",
        f"redis://127.0.0.1:{overlay.proxy.port}",
    )
    running = subprocess.Popen(
        [sys.executable, "-m", "sparkis", "swap-check", *addresses, "--delete-copies", "--yes"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(),
    )
    eventually(lambda: upstream.call("DBSIZE").plain < found, interval_s=0.001)
    overlay.signal_upstream(signal.SIGSTOP)
    try:
        running.send_signal(signal.SIGINT)
        output = running.communicate()[1]
    finally:
        overlay.signal_upstream(signal.SIGCONT)
    assert running.returncode == 130
    assert re.fullmatch(
        r"sparkis swap-check: interrupted; [\d,]+ copies are deleted, run the command again for the others\n", output
    ), output
    assert delete_copies(overlay, "--yes").stdout.endswith(" copies deleted.\n")
    assert sorted(upstream.call("KEYS", "*").plain) == sorted(OTHERS)


def test_delete_without_consent_removes_nothing(overlay: Overlay, upstream: Connection) -> None:
    before = upstream.call("DBSIZE").plain
    done = delete_copies(overlay)
    assert done.returncode == 1 and "nothing is deleted: to delete 10 copies, give --yes" in done.stderr
    for answer, code in ((b"n\n", 1), (b"y\n", 0)):
        ours, theirs = pty.openpty()
        os.write(ours, answer)
        line = [
            sys.executable,
            "-m",
            "sparkis",
            "swap-check",
            "--upstream",
            f"redis://127.0.0.1:{overlay.upstream_port}",
        ]
        words = ["--delete-copies", "--proxy", f"redis://127.0.0.1:{overlay.proxy.port}"]
        assert upstream.call("DBSIZE").plain == before
        asked = subprocess.run([*line, *words], env=child_environment(), stdin=theirs, capture_output=True, check=False)
        assert asked.returncode == code and b"Delete these 10 copies? [y/N] " in asked.stderr
        os.close(ours)
        os.close(theirs)
    assert upstream.call("DBSIZE").plain == len(OTHERS)


def test_delete_keeps_keys_of_released_jobs_and_writers(overlay: Overlay, upstream: Connection, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(
        '[[rule]]\nkeys = "dash/<account>/apdex"\nowner = "upstream"\n'
        '[[rule]]\nkeys = "job:speed:<car>"\nowner = "state"\nwrites = "pass"\n'
    )
    proxy = overlay.start_overlay("--routes", str(rules), is_ready=False)
    done = delete_copies(overlay, "--yes", "--json", proxies=(proxy,))
    assert json.loads(done.stdout) == {
        "upstream": f"127.0.0.1:{overlay.upstream_port}",
        "copies": {},
        "written": {"job:speed": 9},
        "deleted": 0,
    }
    assert "9 copies of job:speed are left" in delete_copies(overlay, proxies=(proxy,)).stdout
    done = delete_copies(overlay, "--yes", proxies=(overlay.proxy, proxy))
    assert done.returncode == 1 and "the proxies do not agree about the key" in done.stderr
    with overlay.proxy.connect() as client:
        client.call("STATE", "RELEASE", "job")
    assert delete_copies(overlay, "--yes").stdout.endswith("has no old copies of keys that states own.\n")
    assert upstream.call("DBSIZE").plain == len(COPIES) + len(OTHERS)


def test_delete_at_other_redis_is_refused(overlay: Overlay, upstream: Connection, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with redis_server(tmp_path / "other") as other, other.connect() as connection:
        connection.call("SET", "job:speed:1", "of another team")
        done = swap_check(
            *("--upstream", f"redis://127.0.0.1:{other.port}", "--delete-copies", "--yes"),
            *("--proxy", f"redis://127.0.0.1:{overlay.proxy.port}"),
        )
        assert connection.call("DBSIZE").plain == 1
    assert done.returncode == 1 and "has another upstream than" in done.stderr
    done = delete_copies(overlay, "--yes", proxies=(overlay.nodes[0],))
    assert done.returncode == 1 and "is no proxy with an upstream" in done.stderr
    assert upstream.call("DBSIZE").plain == len(COPIES) + len(OTHERS)


def test_delete_keeps_other_databases(overlay: Overlay, upstream: Connection) -> None:
    upstream.call("SELECT", "4")
    upstream.call("SET", "job:speed:1", "of another database")
    words = ("--delete-copies", "--yes", "--proxy", f"redis://127.0.0.1:{overlay.proxy.port}")
    done = swap_check("--upstream", f"redis://127.0.0.1:{overlay.upstream_port}/4", *words)
    assert done.returncode == 0 and "has no old copies" in done.stdout
    proxy = overlay.start_at(f"redis://127.0.0.1:{overlay.upstream_port}/4")
    overlay.wait_until_ready(proxy)
    done = delete_copies(overlay, "--yes", proxies=(proxy,))
    assert done.returncode == 1 and "see database 4: name it in the URL" in done.stderr
    assert upstream.call("DBSIZE").plain == 1


def test_delete_removes_copies_at_all_nodes_of_cluster(overlay: Overlay, tmp_path: Path) -> None:
    with ExitStack() as stack:
        (tmp_path / "cluster").mkdir()
        cluster = RedisCluster(tmp_path / "cluster", stack)
        for key in (*COPIES, *OTHERS):
            cluster.call(cluster.master_of(key.decode()), "SET", key, OLD)
        url = f"redis+cluster://127.0.0.1:{cluster.nodes[0].port}"
        proxy = overlay.start_at(url)
        overlay.wait_until_ready(proxy)
        done = swap_check("--upstream", url, "--delete-copies", "--yes", "--proxy", f"redis://127.0.0.1:{proxy.port}")
        assert done.returncode == 0 and done.stdout.endswith("\n10 copies deleted.\n"), done.stderr
        left = sorted(key for node in cluster.nodes for key in node.connect().call("KEYS", "*").plain)
        assert left == sorted(OTHERS)


def test_delete_stops_before_owners_are_known(overlay: Overlay, upstream: Connection, tmp_path: Path) -> None:
    before = upstream.call("DBSIZE").plain
    topology = tmp_path / "cluster.json"
    absent = {"host": "127.0.0.1", "port": free_port(), "slots": "0-16383"}
    topology.write_text(json.dumps({"version": 1, "nodes": [absent]}))
    given = ("--upstream", f"redis://127.0.0.1:{overlay.upstream_port}", "--ownership", str(tmp_path / "owners.json"))
    with sparkis_proxy(topology, *given) as proxy, proxy.connect() as client:
        assert client.call("STATE", "OWNER", "session:1").plain.startswith(b"LOADING the key formats")
        asked = sparkis(proxy, "health")
        done = delete_copies(overlay, "--yes", proxies=(proxy,))
    assert asked.returncode == 1 and "LOADING the key formats of the states are not known yet" in asked.stderr
    assert done.returncode == 1 and "LOADING the key formats of the states are not known yet" in done.stderr
    assert upstream.call("DBSIZE").plain == before


def test_state_owner_command_names_owners_of_keys(overlay: Overlay) -> None:
    with overlay.proxy.connect() as client:
        assert client.call("STATE", "OWNER", "job:speed:1", "session:1").plain == [
            [b"state", b"job:speed", b"refuse"],
            [b"upstream", b"", b"pass"],
        ]
        client.call("SELECT", "1")
        assert client.call("STATE", "OWNER", "job:speed:1").plain == [[b"upstream", b"", b"pass"]]
        assert client.call("STATE", "OWNER", *(["k"] * 129)).plain.startswith(b"ERR 129 keys are given")
