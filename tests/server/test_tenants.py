"""A tenant, whose user may read one job's keys, learns nothing of another job by any command, here or at a proxy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import pytest

from compat.conformance.servers import Running, free_port, sparkis_proxy, sparkis_server, wait_for_keys
from compat.conformance.wire import Connection, replies_in, request, requests, scanned
from resp_server.commands import command_table
from state_backend.codec import packed_map
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from tests.builders import put_value, write_log
from tests.server.nodes import PATIENT

MINE, OTHERS = "mine", "rival"
# What of the other job is never sent, so that nothing but the state itself can have told it.
VALUE, HIDDEN, STATE, COUNT = b"s3cr3t", b"hidden", b"vault", 777
OTHERS_KEYS = 4 + COUNT
KEYS = 7 + OTHERS_KEYS
# In texts, or how many keys there are, where that is said: other numbers may be the same.
MARK = re.compile(
    rb"%b|%b|%b|\n:(%d|%d|%d)\r|keys=(%d|%d)" % (VALUE, HIDDEN, STATE, COUNT, OTHERS_KEYS, KEYS, OTHERS_KEYS, KEYS)
)
SETUSER = (
    *("ACL", "SETUSER", "tenant", "reset", "on", "nopass", "+@all", "-@admin", "~mine:*", "&*"),
    *("(~part:a:* +@read +scan +dbsize)",),
)
# What follows the name of a command.
PROBES: Sequence[Sequence[bytes]] = [
    (),
    (b"rival:text:sent",),
    (b"rival:text:sent", b"rival:map:sent"),
    (b"rival",),
    (b"rival:map",),
    (b"rival:map:sent", b"field"),
    (b"rival:list:sent", b"0", b"-1"),
    (b"rival:map:sent", b"0"),
    (b"2", b"rival:map:sent", b"rival:text:sent"),
    (b"0",),
    (b"0", b"COUNT", b"1000"),
    (b"*",),
    (b"all",),
    (b"1", b"*", b"KEYS", b"*"),
    (b"0", b"10000"),
    (b"GET", b"rival:text:sent"),
    (b"rival", b"1", b"1", b"0"),
    (b"mine:list:1", b"BY", b"nosort", b"GET", b"rival:te*t:sent"),  # the list holds an x
]

SHARED_STATES = [
    StateDescriptor("text", key="k", value="v"),
    StateDescriptor("map", key="k", value="v", field="f"),
    StateDescriptor("list", key="k", value="v", kind="list"),
]
STATES = {
    MINE: [*SHARED_STATES, StateDescriptor("part", value="v", key_format="part:<k>")],
    OTHERS: [*SHARED_STATES, StateDescriptor(STATE.decode(), key="k", value="v")],
}


def publish(log: Path) -> None:
    with LogWriter(log, MINE, STATES[MINE], MINE) as job:
        job.publish(
            [
                Change("text", Op.PUT, b"mine:text:1", value=b"x"),
                Change("text", Op.PUT, b"mine:text:again", value=b"x"),
                Change("map", Op.PUT, b"mine:map:1", value=packed_map.pack([(b"field", b"x")])),
                Change("list", Op.APPEND, b"mine:list:1", value=b"x"),
                Change("part", Op.PUT, b"part:a:1", value=b"x"),
                Change("part", Op.PUT, b"part:a:2", value=b"x"),
                Change("part", Op.PUT, b"part:b:hidden", value=VALUE),
            ],
            0,
        )
    with LogWriter(log, OTHERS, STATES[OTHERS], OTHERS) as job:
        job.publish(
            [
                Change("text", Op.PUT, b"rival:text:sent", value=VALUE),
                Change("text", Op.PUT, b"rival:text:" + HIDDEN, value=VALUE),
                Change("map", Op.PUT, b"rival:map:sent", value=packed_map.pack([(b"field", VALUE)])),
                Change("list", Op.APPEND, b"rival:list:sent", value=VALUE),
                *(Change("vault", Op.PUT, b"rival:vault:hidden%d" % at, value=VALUE) for at in range(COUNT)),
            ],
            0,
        )


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tenants") / "log"
    publish(root)
    return root


@pytest.fixture(scope="module", params=["server", "proxy"])
def endpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, log: Path) -> Iterator[Running]:
    """A server of both jobs; or a proxy before two servers, each with half of the slots."""
    folder = tmp_path_factory.mktemp(request.param)
    with ExitStack() as stack:
        if request.param == "server":
            running = stack.enter_context(sparkis_server(folder / "store", log))
        else:
            ports = [free_port(), free_port()]
            nodes = [
                {"host": "127.0.0.1", "port": port, "slots": slots}
                for port, slots in zip(ports, ("0-8191", "8192-16383"), strict=True)
            ]
            topology = folder / "cluster.json"
            topology.write_text(json.dumps({"version": 1, "nodes": nodes}))
            for port in ports:
                options = ("--cluster", str(topology), "--cluster-node", f"127.0.0.1:{port}")
                stack.enter_context(sparkis_server(folder / str(port), log, *options, port=port))
            running = stack.enter_context(sparkis_proxy(topology, *PATIENT))
        wait_for_keys(running, KEYS)
        with running.connect() as connection:
            assert connection.call(*SETUSER).value == b"OK"
        yield running


@pytest.fixture
def tenant(endpoint: Running) -> Iterator[Connection]:
    with Connection(endpoint.port) as connection:
        assert connection.call("AUTH", "tenant", "").value == b"OK"
        yield connection


def reply_to(endpoint: Running, user: str, words: Sequence[bytes]) -> bytes:
    """Return all that a connection of a user is sent for a request."""
    with Connection(endpoint.port) as connection:
        connection.send(request("AUTH", user, "") + requests([words]))
        connection.end()
        return bytes(connection.read_to_end())


def probes() -> Iterator[Sequence[bytes]]:
    """Each command that is served, with names of the other job wherever names could be."""
    everything = [each for one in command_table() for each in (one, *one.subcommands.values()) if each.handler]
    for command, probe in product(everything, PROBES):
        words = (*command.name.encode().split(b"|"), *probe)
        arity = command.facts.arity
        if (len(words) == arity if arity > 0 else len(words) >= -arity) and command.name != "acl|genpass":
            yield words


def test_no_command_shows_tenant_another_job(endpoint: Running) -> None:
    asked = list(probes())
    assert len(asked) > 500
    for words in asked:
        answer = reply_to(endpoint, "tenant", words)
        found = MARK.search(answer)
        assert found is None, f"{words} tells {found[0]!r}: {answer[:500]!r}"


def test_same_commands_show_all_jobs_to_user_that_may_read_them(endpoint: Running) -> None:
    telling = (b"KEYS *", b"GET rival:text:sent", b"STATE JOBS", b"STATE LIST rival", b"DBSIZE", b"INFO sparkis")
    for line in telling:
        assert MARK.search(reply_to(endpoint, "default", line.split())), line


def test_tenant_sees_all_of_its_own(tenant: Connection) -> None:
    mine = {b"mine:text:1", b"mine:text:again", b"mine:map:1", b"mine:list:1", b"part:a:1", b"part:a:2"}
    assert set(tenant.call("KEYS", "*").plain) == mine
    assert tenant.call("DBSIZE").value == len(mine)
    assert set(scanned(tenant)) == mine
    assert {tenant.call("RANDOMKEY").value for _ in range(200)} == mine
    assert tenant.call("GET", "mine:text:1").value == b"x"
    assert tenant.call("HGETALL", "mine:map:1").plain == [b"field", b"x"]
    assert tenant.call("GET", "part:a:1").value == b"x"
    for words in (("GET", "part:b:hidden"), ("MGET", "mine:text:1", "rival:text:sent"), ("TYPE", "rival:text:sent")):
        assert tenant.call(*words).value == b"NOPERM No permissions to access a key"


def test_tenant_sees_its_job_alone_and_counts_only_readable_keys(tenant: Connection) -> None:
    (row,) = tenant.call("STATE", "JOBS").plain
    fields = dict(zip(row[::2], row[1::2], strict=True))
    assert fields[b"name"] == b"mine"
    assert fields[b"keys"] is None  # of one of its states it may read some keys
    assert [each[1::2] for each in tenant.call("STATE", "LIST", "mine").plain] == [
        [b"text", b"value", 2, None],  # there is no snapshot yet, which counts bytes
        [b"map", b"map", 1, None],
        [b"list", b"list", 1, None],
        [b"part", b"value", None, None],
    ]
    assert tenant.call("STATE", "LIST", "rival").value == b"ERR no such job 'rival'; jobs: mine"
    info = tenant.call("INFO").plain
    assert b"sparkis_jobs:1\r\n" in info
    assert b"keys=unknown" in info


def test_tenants_pipelines_are_checked_request_by_request(tenant: Connection) -> None:
    asked = [b"GET mine:text:1", b"GET rival:text:sent", b"MGET mine:text:1 part:a:1", b"HGET mine:map:1 field"] * 3
    tenant.send(requests([line.split() for line in asked]))
    tenant.end()
    answers = [reply.plain for reply in replies_in(bytes(tenant.read_to_end()))]
    denied = b"NOPERM No permissions to access a key"
    # One selector has to allow all of a request.
    assert answers == [b"x", denied, denied, b"x"] * 3


def test_tenants_transactions_are_checked_at_queueing_and_exec(endpoint: Running, tenant: Connection) -> None:
    assert tenant.call("MULTI").value == b"OK"
    assert tenant.call("GET", "rival:text:sent").value == b"NOPERM No permissions to access a key"
    assert tenant.call("EXEC").value.startswith(b"EXECABORT ")
    assert tenant.call("WATCH", "rival:text:sent").value == b"NOPERM No permissions to access a key"
    assert tenant.call("MULTI").value == b"OK"
    assert tenant.call("GET", "mine:text:1").value == b"QUEUED"
    with endpoint.connect() as connection:
        connection.call("ACL", "SETUSER", "tenant", "resetkeys")
        answer = tenant.call("EXEC")
        connection.call(*SETUSER)
    assert b"ACLs rules changed between" in answer.raw
    assert b"$1\r\nx" not in answer.raw


def test_tenant_is_notified_of_its_own_changes_alone(endpoint: Running, log: Path) -> None:
    with endpoint.connect() as admin, Connection(endpoint.port) as notified, Connection(endpoint.port) as tracking:
        admin.call("CONFIG", "SET", "notify-keyspace-events", "KEA")
        for connection in (notified, tracking):
            assert connection.call("HELLO", "3", "AUTH", "tenant", "").type == "%"
        notified.send(request("PSUBSCRIBE", "*"))
        assert notified.call("PING").plain in (b"PONG", [b"psubscribe", b"*", 1])
        tracking.send(request("CLIENT", "TRACKING", "ON", "BCAST"))
        assert b"rival" not in read_until(tracking, b"+OK\r\n")  # a proxy may send what changed meanwhile before it
        for name, key in ((OTHERS, b"rival:text:" + HIDDEN), (MINE, b"mine:text:again")):
            value = b"%d" % endpoint.port
            write_log(log, name, STATES[name], [put_value("text", key, value)], query_id=name)
            while admin.call("GET", key).value != value:
                pass
        received = {connection: read_until(connection, b"mine:text:again") for connection in (notified, tracking)}
        admin.call("CONFIG", "SET", "notify-keyspace-events", "")
    for messages in received.values():
        assert b"rival" not in messages


def read_until(connection: Connection, end: bytes) -> bytes:
    """Return all frames that a connection is sent, up to one that has a text in it."""
    received = b""
    while end not in received:
        received += connection.read().raw
    return received
