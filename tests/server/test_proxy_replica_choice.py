"""A proxy and servers that come, go, hang and fall behind: reads neither fail nor go back in time."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any

import pytest

from compat.conformance.servers import (
    CONTROL_TOKEN,
    Running,
    free_port,
    sparkis_proxy,
    sparkis_server,
    wait_for_keys,
)
from compat.conformance.wire import Connection, replies_in, requests, scanned
from compat.waiting import READ_PAUSE_S, WAIT_S_MAX, eventually
from state_backend.model.slot_set import SlotSet
from state_backend.model.slots import SLOTS, slot_of
from tests.server.nodes import HALVES, PATIENT
from tests.server.replicas import KEYS, MASTER_AND_REPLICA, PROXY, Cluster, Job, start_program, tell, wait_for

LONG_BYTES = 24 << 20


def appliers_of(server: Running) -> list[int]:
    found = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(server.process.pid)], capture_output=True, text=True
    )
    return [int(line.split()[0]) for line in found.stdout.splitlines() if "state_backend.apply.applier" in line]


# How long a proxy waits for a server that hangs: longer than one that is only slow takes for an answer.
HANG_MS = 4_000
# The same where what it waits for never comes.
REFUSED_MS = 1_000


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two servers with half of the slots each, which tests share: each test leaves both at the newest epoch."""
    with ExitStack() as stack:
        yield Cluster(tmp_path_factory.mktemp("halves"), stack, *HALVES)


@pytest.fixture(scope="module")
def impatient(halves: Cluster) -> Running:
    """A proxy of the shared servers that soon gives up."""
    return halves.proxy_of(REFUSED_MS)


@contextmanager
def applier_stopped(cluster: Cluster, at: int) -> Iterator[None]:
    """Stop the applier of a server, so that the server stays at its epoch; afterwards it reaches the newest one."""
    (applier,) = appliers_of(cluster.servers[at])
    os.kill(applier, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(applier, signal.SIGCONT)
    tell(cluster.servers[at], cluster.job, "j")
    eventually(lambda: cluster.shows(at), awaited="the server has the newest epoch")


def read_on(cluster: Cluster, stop: Event, protocol: bytes) -> tuple[int, list[Any]]:
    """Read all keys again and again; return the errors, and replies that are of an earlier epoch than one before."""
    wrong: list[Any] = []
    rounds, seen = 0, -1
    some = cluster.job.keys[:2]
    pipelines: list[list[tuple[bytes, ...]]] = [
        [(b"GET", key) for key in cluster.job.keys],
        [(b"MGET", *cluster.job.keys), *((b"GET", key) for key in some), (b"MGET", *cluster.job.keys)],
        [(b"MULTI",), *((b"GET", key) for key in some), (b"EXEC",)],
        *([(b"GET", key)] for key in cluster.job.keys[:4]),
        [(b"STRLEN", cluster.job.keys[0]), *((b"GET", key) for key in cluster.job.keys)],
    ]
    with cluster.proxy.connect() as connection:
        connection.call("HELLO", protocol)
        while not stop.wait(READ_PAUSE_S):
            pipeline = pipelines[rounds % len(pipelines)]
            rounds += 1
            connection.send(requests(pipeline))
            for request in pipeline:
                reply = connection.read()
                values = reply.plain if isinstance(reply.plain, list) else [reply.plain]
                if reply.is_error:
                    wrong.append((request[0], reply.raw))
                elif request[0] in (b"GET", b"MGET", b"EXEC") and values != [b"QUEUED"]:
                    epochs = [int(value) for value in values]
                    if min(epochs) < seen:
                        wrong.append((request[:2], epochs, seen))
                    seen = max(seen, *epochs)
    return rounds, wrong


@contextmanager
def read_meanwhile(cluster: Cluster) -> Iterator[None]:
    """Read with several clients during the block: nothing fails, and time does not run backwards."""
    stop = Event()
    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read_on, cluster, stop, protocol) for protocol in (b"2", b"3", b"2", b"3")]
        try:
            yield
        finally:
            stop.set()
        for reader in readers:
            rounds, wrong = reader.result()
            assert rounds
            assert not wrong, wrong[:3]


def test_replica_stands_in_for_master_that_is_killed_or_hangs(tmp_path: Path) -> None:
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack, *MASTER_AND_REPLICA, patience_ms=HANG_MS)
        with read_meanwhile(cluster):
            cluster.publish(0, 1)
            cluster.servers[0].process.send_signal(signal.SIGSTOP)
            eventually(lambda: _answers(cluster, 1), awaited="the replica answers")
            cluster.servers[0].process.send_signal(signal.SIGCONT)
            eventually(lambda: _answers(cluster, 0), awaited="the master answers")
            cluster.servers[0].process.kill()
            eventually(lambda: _answers(cluster, 1), awaited="the replica answers")
            cluster.publish(1)
            cluster.servers[0] = cluster.start(0)
            eventually(lambda: _answers(cluster, 0), awaited="the master answers")
            cluster.publish(0, 1)


def test_mget_survives_loss_of_both_connections_to_killed_server(tmp_path: Path) -> None:
    """The connection of the MGET is lost first, then the one over which its parts were sent."""
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack, *MASTER_AND_REPLICA)
        with cluster.proxy.connect() as client, cluster.servers[0].connect() as direct:
            client.call("HELLO", "3")
            assert client.call("MGET", *cluster.job.keys).plain == [b"0"] * KEYS
            # A killed process closes its connections in the order in which they were opened: that of RESP3 first.
            before = _proxy_connections(direct, b"resp=2")
            for each in before:
                direct.call("CLIENT", "KILL", "ID", each)
            eventually(lambda: _newest_answers(cluster, direct, before), awaited="the proxy has connected again")
            cluster.servers[0].process.send_signal(signal.SIGSTOP)
            client.send(requests([(b"MGET", *cluster.job.keys)]))
            eventually(lambda: cluster.requests_waiting_at(0, cluster.proxy), awaited="the MGET is sent")
            cluster.servers[0].process.kill()
            assert client.read().plain == [b"0"] * KEYS


def _proxy_connections(server: Connection, protocol: bytes) -> list[str]:
    """Return the ids of a proxy's connections of a protocol at a server."""
    clients = [line.split() for line in bytes(server.call("CLIENT", "LIST").plain).splitlines()]
    return [each[0][3:].decode() for each in clients if b"name=sparkis-proxy" in each and protocol in each]


def _newest_answers(cluster: Cluster, server: Connection, before: Sequence[str]) -> bool:
    with cluster.proxy.connect() as client:
        client.call("GET", cluster.job.keys[0])
    connected = _proxy_connections(server, b"resp=2")
    return bool(connected) and not set(connected) & set(before) and _answers(cluster, 0)


def test_master_that_falls_behind_gives_way_to_its_replica(tmp_path: Path) -> None:
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack, *MASTER_AND_REPLICA)
        (applier,) = appliers_of(cluster.servers[0])
        with read_meanwhile(cluster):
            os.kill(applier, signal.SIGSTOP)
            try:
                cluster.publish(1)
                eventually(lambda: _answers(cluster, 1), awaited="the replica answers")
                with cluster.proxy.connect() as connection:
                    assert connection.call("GET", cluster.job.keys[0]).plain == b"1"
            finally:
                os.kill(applier, signal.SIGCONT)
            eventually(lambda: _answers(cluster, 0), awaited="the master is back")


def _answers(cluster: Cluster, at: int) -> bool:
    with cluster.proxy.connect() as connection:
        text = bytes(connection.call("INFO", "proxy").plain).decode()
    return f"addr=127.0.0.1:{cluster.ports[at]},slots=16384," in text


def test_servers_at_different_epochs_answer_each_client_in_order(halves: Cluster) -> None:
    appliers = [appliers_of(each)[0] for each in halves.servers]
    with read_meanwhile(halves):
        for turn in range(20):
            slower, faster = turn % 2, (turn + 1) % 2
            os.kill(appliers[slower], signal.SIGSTOP)
            halves.publish(faster)
            # Some read the newer one from then on, and wait for the slower server.
            eventually(lambda at=faster: halves.shows(at), awaited="the faster server has the epoch")
            sleep(0.02)
            os.kill(appliers[slower], signal.SIGCONT)
            tell(halves.servers[slower], halves.job, "j")
            eventually(lambda at=slower: halves.shows(at), awaited="the slower server has the epoch")


def test_client_that_has_seen_epoch_gets_no_reply_of_server_without_it(halves: Cluster, impatient: Running) -> None:
    newer, older = halves.key_of(0), halves.key_of(1)
    with impatient.connect() as client, impatient.connect() as other:
        with applier_stopped(halves, 1):
            before = halves.value
            halves.publish(0)
            now = halves.value
            eventually(lambda: client.call("GET", newer).plain == now, awaited="the first server has it")
            for request in (("GET", older), ("MGET", older, newer), ("STRLEN", older), ("SCAN", str(1 << 52))):
                assert client.call(*request).raw.startswith(b"-TRYAGAIN")
            assert other.call("GET", older).plain == before
            client.send(requests([(b"GET", newer), (b"GET", older), (b"GET", newer)]))
            first, refused, last = (client.read() for _ in range(3))
            assert (first.plain, refused.raw[:9], last.plain) == (now, b"-TRYAGAIN", now)
            other.send(requests([(b"GET", older), (b"GET", newer)]))
            assert [other.read().plain for _ in range(2)] == [before, now]
            assert client.call("PING").plain == b"PONG"
            assert client.call("INFO", "server").plain
        eventually(lambda: client.call("GET", older).plain == now, awaited="the older value is replaced")


@pytest.mark.parametrize("options", [(), ("--workers", "2")], ids=["one process", "workers"])
def test_servers_answer_from_newest_common_epoch_without_log(tmp_path: Path, options: Sequence[str]) -> None:
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack, *HALVES, {"replica_of": "the first"}, options=options)
        newer, older = cluster.key_of(0), cluster.key_of(1)
        transaction = requests([(b"MULTI",), (b"GET", newer), (b"GET", older), (b"EXEC",)])
        proxy = cluster.proxy_of(REFUSED_MS)
        client = stack.enter_context(proxy.connect())
        cluster.publish(0, 1, 2)
        for each in (newer, older):
            eventually(lambda key=each: client.call("GET", key).plain == cluster.value, awaited="the new value")
        (applier,) = appliers_of(cluster.servers[1])
        os.kill(applier, signal.SIGSTOP)
        before = cluster.value
        cluster.publish(0, 2)
        now = cluster.value
        eventually(lambda: client.call("GET", newer).plain == now, awaited="the first server has it")
        assert client.call("GET", older).raw.startswith(b"-TRYAGAIN")
        eventually(lambda: cluster.shows(2), awaited="the replica has it")
        cluster.log.rename(tmp_path / "away")
        os.kill(applier, signal.SIGCONT)
        eventually(lambda: client.call("GET", older).plain == before, awaited="the servers agree on the epoch before")
        with proxy.connect() as other:
            for each in (client, other):
                assert each.call("GET", newer).plain == before
                assert each.call("MGET", newer, older).plain == [before, before]
                each.send(transaction)
                assert [each.read().plain for _ in range(4)] == [b"OK", b"QUEUED", b"QUEUED", [before, before]]
                assert each.call("DBSIZE").plain == KEYS
                (lag,) = each.call("STATE", "LAG").plain
                assert dict(zip(lag[::2], lag[1::2], strict=True))[b"stale"] == 1
        cluster.servers[0].process.kill()
        eventually(lambda: client.call("MGET", newer, older).plain == [before] * 2, awaited="the replica answers, too")
        (tmp_path / "away").rename(cluster.log)
        for at in (1, 2):
            tell(cluster.servers[at], cluster.job, "j")
        eventually(lambda: client.call("MGET", newer, older).plain == [now, now], awaited="both have the newest epoch")
        client.send(transaction)
        assert [client.read().plain for _ in range(4)][3] == [now, now]
        cluster.publish(1, 2)
        eventually(lambda: client.call("MGET", newer, older).plain == [cluster.value] * 2, awaited="the next epoch")


def test_transaction_waits_for_common_epoch_up_to_timeout(halves: Cluster) -> None:
    newer, older = halves.key_of(0), halves.key_of(1)
    with halves.proxy.connect() as client:
        with applier_stopped(halves, 1):
            halves.publish(0)
            eventually(lambda: client.call("GET", newer).plain == halves.value, awaited="the first server has it")
            client.send(requests([(b"MULTI",), (b"GET", newer), (b"GET", older), (b"EXEC",)]))
            sleep(5)  # longer than any number of tries took
        both = [halves.value, halves.value]
        assert [client.read().plain for _ in range(4)] == [b"OK", b"QUEUED", b"QUEUED", both]


def test_client_that_has_seen_epoch_is_answered_by_replica_with_it(tmp_path: Path) -> None:
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack, {"slots": "8192-16383"}, {"slots": "0-8191"}, {"replica_of": "the first"})
        (applier,) = appliers_of(cluster.servers[0])
        newer, older = (next(key for key in cluster.job.keys if slot_of(key) // 8192 == half) for half in (0, 1))
        with cluster.proxy.connect() as client:
            os.kill(applier, signal.SIGSTOP)
            try:
                cluster.publish(1, 2)
                eventually(lambda: client.call("GET", newer).plain == b"1", awaited="the second server has it")
                assert client.call("GET", older).plain == b"1"
            finally:
                os.kill(applier, signal.SIGCONT)


def test_new_owner_answers_once_it_has_old_owners_epoch(halves: Cluster, impatient: Running) -> None:
    key, other = halves.key_of(0), halves.job.keys[1]
    with impatient.connect() as connection:
        with applier_stopped(halves, 1):
            halves.publish(0)
            eventually(lambda: connection.call("GET", key).plain == halves.value, awaited="the first server has it")
            halves.move(connection, {"slots": ""}, {"slots": "0-16383"})
            for request in (("GET", key), ("STRLEN", key), ("MGET", key, other), ("DBSIZE",)):
                eventually(lambda r=request: connection.call(*r).raw.startswith(b"-TRYAGAIN"), awaited="TRYAGAIN")
        eventually(lambda: not connection.call("GET", key).is_error, awaited="the new owner answers")
        assert connection.call("GET", key).plain == halves.value
    for proxy in (impatient, halves.proxy):
        with proxy.connect() as connection:
            halves.move(connection, *HALVES)
            eventually(lambda c=connection: c.call("DBSIZE").plain == KEYS, awaited="each server has its half again")


def test_long_value_delays_no_other_client(tmp_path: Path) -> None:
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack, {"slots": "0-16383"})
        long, *others = cluster.job.keys
        text = os.urandom(LONG_BYTES // 16).hex().encode() * 8
        cluster.job.publish({long: text})
        tell(cluster.servers[0], cluster.job, "j")
        with cluster.proxy.connect() as connection, cluster.proxy.connect() as other:
            eventually(lambda: connection.call("STRLEN", long).plain == len(text), awaited="the new value")
            asked = [(b"GET", key) for key in (others[0], long, others[1])] * 2 + [(b"MGET", long, others[0])]
            connection.send(requests(asked))
            for key in others:
                assert other.call("GET", key).plain == b"0"
            expected = [b"0", text, b"0"] * 2
            assert [connection.read().plain for _ in expected] == expected
            assert connection.read().plain == [text, b"0"]
            assert connection.call("GET", others[0]).plain == b"0"


def test_proxy_finds_servers_of_log_and_needs_no_registry_afterwards(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    job = Job(log, "j")
    with ExitStack() as stack:
        by_log = start_program(stack, *PROXY, "--log", str(log))
        with by_log.connect() as connection:
            for request in (("GET", job.keys[0]), ("DBSIZE",), ("STATE", "LIST", "j")):
                assert connection.call(*request).raw.startswith(b"-CLUSTERDOWN")
            assert connection.call("STATE", "JOBS").plain == []
        registry = start_program(stack, "resp_server.programs.registry", "--log", str(log), "--port", "0")
        by_registry = start_program(stack, *PROXY, "--registry", f"127.0.0.1:{registry.port}")
        for each in range(2):
            options = ("--log", str(log), "--port", "0", "--store", str(tmp_path / f"store{each}"))
            start_program(stack, "resp_server.programs.state_server", *options)
        for proxy in (by_log, by_registry):
            wait_for(proxy, KEYS)
        eventually(lambda: _is_settled(log), awaited="the slots are where they are to be")
        registry.process.kill()
        late = start_program(stack, *PROXY, "--log", str(log))
        wait_for(late, KEYS)
        for proxy in (by_log, by_registry, late):
            with proxy.connect() as connection:
                assert connection.call("MGET", *job.keys).plain == [b"0"] * KEYS
                assert connection.call("STATE", "LIST", "j").plain[0][5] == KEYS
                (row,) = connection.call("STATE", "JOBS").plain
                facts = dict(zip(row[::2], row[1::2], strict=True))
                assert (facts[b"keys"], facts[b"applied"], facts[b"slots"]) == (KEYS, 0, b"0-16383")
                assert f"db0:keys={KEYS},".encode() in connection.call("INFO", "keyspace").plain
                assert b"job_j:epoch=0,committed_epoch=0" in connection.call("INFO").plain
                assert connection.call("STATE", "DESCRIBE", "j:value").plain[1] == b"j"


def test_registry_of_ipv6_is_found_through_log_or_by_its_address(tmp_path: Path) -> None:
    if not is_ours("::1"):
        pytest.skip("this machine has no ::1")
    log = tmp_path / "log"
    log.mkdir()
    Job(log, "j")
    with ExitStack() as stack:
        registry = start_program(
            stack, "resp_server.programs.registry", "--log", str(log), "--port", "0", "--bind", "::1"
        )
        options = ("--log", str(log), "--port", "0", "--store", str(tmp_path / "store"))
        start_program(stack, "resp_server.programs.state_server", *options)
        wait_for(start_program(stack, *PROXY, "--registry", f"[::1]:{registry.port}"), KEYS)


def is_ours(host: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind((host, 0))
        return True
    except OSError:
        return False


def _is_settled(log: Path) -> bool:
    """Return whether two servers have half of the slots each, and know it."""
    topology = json.loads((log / "registry.json").read_text())["topology"]
    for node in topology["nodes"]:
        with Connection(node["port"]) as connection:
            shown = json.loads(connection.call("STATE", "TOPOLOGY").plain)
        if len(SlotSet.parse(node["slots"])) != SLOTS // 2 or shown["version"] != topology["version"]:
            return False
    return True


def test_several_state_clusters_answer_behind_one_proxy(tmp_path: Path) -> None:
    with ExitStack() as stack:
        jobs, files = [], []
        for number, (name, key_format) in enumerate((("a", None), ("b", "plane/<k>"), ("a", None))):
            log = tmp_path / f"log{number}"
            log.mkdir()
            jobs.append(Job(log, name, key_format))
            port, file = free_port(), tmp_path / f"cluster{number}.json"
            nodes = [{"host": "127.0.0.1", "port": port, "slots": "0-16383"}]
            file.write_text(json.dumps({"version": 1, "nodes": nodes}))
            options = ("--cluster", str(file), "--cluster-node", f"127.0.0.1:{port}")
            server = stack.enter_context(sparkis_server(tmp_path / f"store{number}", log, *options, port=port))
            wait_for_keys(server, KEYS)
            files.append(file)
        jobs[1].publish(dict.fromkeys(jobs[1].keys, b"of b"))
        proxy = stack.enter_context(sparkis_proxy(files[0], *PATIENT, "--cluster", str(files[1])))
        wait_for_keys(proxy, 2 * KEYS)
        a, b = jobs[0].keys, jobs[1].keys
        with proxy.connect() as connection:
            eventually(lambda: connection.call("GET", b[0]).plain == b"of b", awaited="b's epoch")
            values = connection.call("MGET", a[0], b[0], b"a:nothing", b"nobody", b[1]).plain
            assert values == [b"0", b"of b", None, None, b"of b"]
            assert connection.call("EXISTS", *a, *b, b"nobody").plain == 2 * KEYS
            found = scanned(connection, "COUNT", 7)
            assert sorted(found) == sorted(a + b) == sorted(connection.call("KEYS", "*").plain)
            rows = connection.call("STATE", "JOBS").plain
            names = [dict(zip(row[::2], row[1::2], strict=True))[b"name"] for row in rows]
            assert names == [b"a", b"b"]
            assert connection.call("STATE", "DESCRIBE", "b:value").plain[1] == b"b"
            connection.send(requests([(b"GET", key) for key in (a[0], b[0])] * 100))
            assert [connection.read().plain for _ in range(200)] == [b"0", b"of b"] * 100
        twice = stack.enter_context(sparkis_proxy(files[0], *PATIENT, "--cluster", str(files[2])))
        with twice.connect() as connection:
            eventually(lambda: b"is in" in connection.call("GET", a[0]).raw, awaited="both are known")
            answer = connection.call("GET", a[0])
            assert answer.is_error
            assert all(str(each).encode() in answer.raw for each in (files[0], files[2]))


@pytest.mark.parametrize("options", [(), ("--registry", "nowhere")])
def test_options_without_servers_are_refused(options: tuple[str, ...]) -> None:
    environment = os.environ | {"SPARKIS_CONTROL_TOKEN": CONTROL_TOKEN}
    command = [sys.executable, "-m", "resp_server.programs.proxy", *options]
    done = subprocess.run(command, capture_output=True, timeout=WAIT_S_MAX, check=False, env=environment)
    assert done.returncode == 1
    assert b"--registry" in done.stderr


def test_pipelines_cut_anywhere_are_answered_in_order(halves: Cluster) -> None:
    asked = [(b"GET", key) for key in (*halves.job.keys, b"nobody")] * 8
    asked[100:100] = [(b"PING",), (b"get", halves.job.keys[0]), (b"STRLEN", halves.job.keys[1])]
    sent = requests(asked)
    with halves.proxy.connect() as connection:
        connection.send(sent)
        expected = b"".join(connection.read().raw for _ in asked)
    for size in (1, 7, 100, 1000, 4001):
        with halves.proxy.connect() as connection:
            for at in range(0, len(sent), size):
                connection.send(sent[at : at + size])
            connection.end()
            assert b"".join(each.raw for each in replies_in(connection.read_to_end())) == expected
