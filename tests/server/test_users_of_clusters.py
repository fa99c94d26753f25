"""Nodes and proxies with a file of users: clients have its users, and the parts stay connected to each other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from compat.conformance.servers import CONTROL_TOKEN, Running
from compat.conformance.wire import Connection
from compat.waiting import WAIT_S_MAX, eventually
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from tests.server.nodes import HALVES, Nodes

# `default`, who may do little and needs no password, is not who proxies and nodes are.
USERS = """
user default on nopass ~public:* +get
user admin on >a ~* &* +@all
user tenant on >t ~job:v:1* &job:* +@read +@connection +@pubsub
"""
KEYS = [b"job:v:%d" % number for number in range(20)]
BETWEEN_US = "a password of the cluster's parts"


class Cluster(Nodes):
    """Two nodes and a proxy."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__(folder, stack, *HALVES, server_password=BETWEEN_US)
        writer = LogWriter(self.log, "job", [StateDescriptor("v", key="k", value="v")])
        writer.publish([Change("v", Op.PUT, key, value=b"1") for key in KEYS])
        acl = folder / "acl"
        acl.write_text(USERS)
        # The rate of `default` is one of clients: a proxy is asked by all of them.
        given = ("--aclfile", str(acl), "--rate-limit", "default=1")
        self.nodes = [self.start(at, *given) for at in range(2)]
        self.proxy = self.start_proxy(*given)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(tmp_path_factory.mktemp("cluster"), stack)


def logged_in(at: Running, user: str, password: str) -> Connection:
    connection = Connection(at.port)
    assert connection.call("HELLO", 3, "AUTH", user, password).type == "%"
    return connection


def test_proxy_is_exempt_from_default_users_rules_and_rates(cluster: Cluster) -> None:
    with logged_in(cluster.proxy, "admin", "a") as client:
        # The nodes may just have been found.
        eventually(lambda: client.call("DBSIZE").value, lambda count: count == len(KEYS))
        for _ in range(3):
            assert [client.call("GET", key).value for key in KEYS] == [b"1"] * len(KEYS)
    with logged_in(cluster.proxy, "tenant", "t") as client:
        assert client.call("GET", KEYS[1]).value == b"1"
        assert client.call("GET", KEYS[2]).value.startswith(b"NOPERM ")
        assert client.call("DBSIZE").value == 11


def test_message_reaches_clients_of_other_node(cluster: Cluster) -> None:
    here, there = cluster.nodes
    with logged_in(there, "tenant", "t") as listener, logged_in(here, "admin", "a") as publisher:
        assert listener.call("SUBSCRIBE", "job:news").type == ">"
        publisher.call("PUBLISH", "job:news", "told")
        assert listener.read().plain == [b"message", b"job:news", b"told"]


def test_parts_stay_connected_and_unlisted_when_users_are_reloaded(cluster: Cluster) -> None:
    with logged_in(cluster.proxy, "admin", "a") as client:  # the proxy connects to both nodes
        eventually(lambda: client.call("DBSIZE").value, lambda count: count == len(KEYS))
    for node in cluster.nodes:
        with logged_in(node, "admin", "a") as client:
            proxies = {
                line.split()[0] for line in client.call("CLIENT", "LIST").value.split(b"\n") if b"-proxy" in line
            }
            assert proxies
            assert client.call("ACL", "LOAD").value == b"OK"
            assert client.call("ACL", "USERS").plain == [b"admin", b"default", b"tenant"]
            now = {line.split()[0] for line in client.call("CLIENT", "LIST").value.split(b"\n") if b"-proxy" in line}
            assert now >= proxies


@pytest.mark.parametrize("program", ["serve", "state_server", "proxy"])
def test_program_without_its_file_of_users_does_not_start(tmp_path: Path, program: str) -> None:
    command = [sys.executable, "-m", f"resp_server.programs.{program}", "--log", str(tmp_path), "--port", "0"]
    command += ["--aclfile", "/nowhere"]
    if program != "proxy":
        command += ["--store", str(tmp_path / "store")]
    environment = {**os.environ, "SPARKIS_CONTROL_TOKEN": CONTROL_TOKEN}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=WAIT_S_MAX, check=False)
    assert done.returncode == 1
    assert "opening file '/nowhere': No such file" in done.stderr
    assert "Traceback" not in done.stderr


def test_login_of_part_is_refused_at_proxy_and_with_wrong_password(cluster: Cluster) -> None:
    with Connection(cluster.proxy.port) as client:  # as in Redis any password is right for a user that needs none
        assert client.call("AUTH", "default", BETWEEN_US).value == b"OK"
        assert client.call("GET", KEYS[0]).value.startswith(b"NOPERM ")
    with Connection(cluster.nodes[0].port) as client:
        assert client.call("AUTH", "default", "guessed").value == b"OK"
        assert client.call("DBSIZE").value.startswith(b"NOPERM ")
