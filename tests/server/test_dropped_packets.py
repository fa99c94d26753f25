"""Peers whose packets are dropped, though no connection is closed: which reads are answered, and how peers return."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from compat.conformance.servers import Running, sparkis_proxy, sparkis_server, wait_for_keys
from compat.conformance.wire import requests
from compat.waiting import eventually
from tests.server.nodes import HALVES, PATIENT, Nodes
from tests.server.relay import Relay
from tests.server.replicas import KEYS, MASTER_AND_REPLICA, PROXY, Cluster, Job, start_program, wait_for

TIMEOUT_MS = 1_000


def relayed_topology(cluster: Cluster, relays: dict[int, Relay]) -> Path:
    """Write the topology as a proxy sees it that reaches some servers, by their numbers, through relays."""
    nodes = json.loads(cluster.topology.read_text())["nodes"]
    for node in nodes:
        if "replica_of" in node:
            node["replica_of"] = f"127.0.0.1:{relays[0].port if 0 in relays else cluster.ports[0]}"
    for at, relay in relays.items():
        nodes[at]["port"] = relay.port
    topology = cluster.topology.with_name("relayed.json")
    new = topology.with_suffix(".new")
    new.write_text(json.dumps({"version": cluster.version, "nodes": nodes}))
    return new.replace(topology)


def proxy_through(stack: ExitStack, cluster: Cluster, relays: dict[int, Relay], *options: str) -> Running:
    """Start a proxy that reaches some of the servers, by their numbers, through relays."""
    topology = relayed_topology(cluster, relays)
    proxy = stack.enter_context(sparkis_proxy(topology, *options))
    wait_for_keys(proxy, KEYS)
    return proxy


def relay_to(stack: ExitStack, port: int) -> Relay:
    relay = Relay(port)
    stack.callback(relay.stop)
    return relay


def wait_for_reads_at(cluster: Cluster, at: int, proxy: Running) -> None:
    """Wait until one of the servers, by its number, answers the reads of a proxy."""

    def reads() -> bytes:
        return bytes(direct.call("INFO", "commandstats").plain.partition(b"cmdstat_get:")[2].partition(b",")[0])

    def answers_a_read() -> bool:
        before = reads()
        client.call("GET", cluster.job.keys[0])
        return reads() != before

    with proxy.connect() as client, cluster.servers[at].connect() as direct:
        eventually(answers_a_read, awaited="the server answers reads")


@pytest.mark.parametrize("protocol", ["2", "3"])
def test_replica_answers_reads_in_flight_at_mute_master(tmp_path: Path, protocol: str) -> None:
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack, *MASTER_AND_REPLICA)
        relay = relay_to(stack, cluster.ports[0])
        # Nobody waits for the master's own time-out: it is longer than the test.
        proxy = proxy_through(stack, cluster, {0: relay}, *PATIENT)
        one, two = cluster.job.keys[:2]
        reads = {
            "a short read": [(b"GET", one)],
            "MGET": [(b"MGET", one, two)],
            "a pipeline": [(b"GET", one), (b"GET", two), (b"STRLEN", one), (b"MGET", two, one)],
            "a transaction": [(b"MULTI",), (b"GET", one), (b"GET", two), (b"EXEC",)],
        }
        with ExitStack() as clients:
            open_connections = {name: clients.enter_context(proxy.connect()) for name in reads}
            for connection in open_connections.values():
                connection.call("HELLO", protocol)
                assert connection.call("GET", one).plain == b"0"
            wait_for_reads_at(cluster, 0, proxy)
            relay.drop()
            for name, connection in open_connections.items():
                connection.send(requests(reads[name]))
            cluster.publish(0, 1)
            for name, connection in open_connections.items():
                last = [connection.read().plain for _ in reads[name]][-1]
                assert last == (b"1" if name == "a short read" else [b"1", b"1"]), name


@pytest.mark.parametrize("protocol", ["2", "3"])
def test_promoted_replica_answers_reads_in_flight_at_mute_master(tmp_path: Path, protocol: str) -> None:
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack, *MASTER_AND_REPLICA)
        relay = relay_to(stack, cluster.ports[0])
        proxy = proxy_through(stack, cluster, {0: relay}, *PATIENT)
        one, two = cluster.job.keys[:2]
        reads = [[(b"GET", one)], [(b"MGET", one, two)], [(b"MULTI",), (b"GET", one), (b"EXEC",)]]
        with ExitStack() as clients:
            connections = [clients.enter_context(proxy.connect()) for _ in reads]
            for connection in connections:
                connection.call("HELLO", protocol)
                assert connection.call("GET", one).plain == b"0"
            wait_for_reads_at(cluster, 0, proxy)
            relay.drop()
            for connection, asked in zip(connections, reads, strict=True):
                connection.send(requests(asked))
            # No epoch comes, so the replica is not ahead: only the topology says that it takes over.
            cluster.write_topology({}, {"slots": "0-16383"})
            relayed_topology(cluster, {0: relay})
            for connection, asked, reply in zip(connections, reads, (b"0", [b"0", b"0"], [b"0"]), strict=True):
                assert [connection.read().plain for _ in asked][-1] == reply


def test_retries_of_mute_host_cost_no_request_timeout(tmp_path: Path) -> None:
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack, *HALVES)
        relay = relay_to(stack, cluster.ports[1])
        proxy = proxy_through(stack, cluster, {1: relay}, "--server-timeout", str(TIMEOUT_MS))
        here, away = cluster.key_of(0), cluster.key_of(1)
        asked = [
            [(b"GET", away)],
            [(b"GET", away), (b"GET", here)],
            [(b"MGET", here, away)],
            [(b"DBSIZE",)],
            [(b"MULTI",), (b"GET", here), (b"GET", away), (b"EXEC",)],
        ]
        with proxy.connect() as connection, proxy.connect() as other:
            assert connection.call("GET", away).plain == b"0"
            other.call("HELLO", "3")
            relay.drop()
            eventually(
                lambda: connection.call("GET", away).is_error and relay.accepted > 1,
                awaited="the proxy gives the server up",
            )
            attempts, answered = relay.accepted, 0
            while relay.accepted < attempts + 3:
                for client in (connection, other):
                    for pipeline in asked:
                        client.send(requests(pipeline))
                        errors = [client.read().is_error for _ in pipeline]
                        assert any(errors)
                        assert not (len(pipeline) == 2 and errors[1]), "the other host's key"
                        answered += 1
            # With a wait for each attempt, one request would be answered between two of them.
            assert answered >= 2 * (relay.accepted - attempts)
            relay.restore()
            for client in (connection, other):
                eventually(lambda c=client: c.call("GET", away).plain == b"0", awaited="its keys are answered")


def test_proxy_of_mute_registry_finds_new_servers(tmp_path: Path) -> None:
    with ExitStack() as stack:
        log = tmp_path / "log"
        log.mkdir()
        Job(log, "j")
        registry = start_program(stack, "resp_server.programs.registry", "--log", str(log), "--port", "0")
        relay = relay_to(stack, registry.port)
        proxy = start_program(stack, *PROXY, "--registry", f"127.0.0.1:{relay.port}")
        eventually(lambda: relay.accepted == 1, awaited="the proxy watches the registry")
        relay.drop()
        options = ("--log", str(log), "--port", "0", "--store", str(tmp_path / "store"))
        start_program(stack, "resp_server.programs.state_server", *options)
        eventually(lambda: relay.accepted > 1, awaited="the proxy leaves the silent connection")
        relay.restore()
        wait_for(proxy, KEYS)


def test_messages_reach_node_after_silent_connection_loss(tmp_path: Path) -> None:
    with ExitStack() as stack:
        nodes = Nodes(tmp_path, stack, *HALVES)
        Job(nodes.log, "j")
        away = nodes.start(1)
        relay = relay_to(stack, nodes.ports[1])
        topology = json.loads(nodes.topology.read_text())
        topology["nodes"][1]["port"] = relay.port
        relayed = tmp_path / "relayed.json"
        relayed.write_text(json.dumps(topology))
        given = ("--cluster", str(relayed), "--cluster-node", f"127.0.0.1:{nodes.ports[0]}")
        here = stack.enter_context(sparkis_server(tmp_path / "store0", nodes.log, *given, port=nodes.ports[0]))
        with here.connect() as publisher, away.connect() as subscriber:
            nodes.wait_for_slots(publisher)
            subscriber.call("SUBSCRIBE", "c")
            publisher.call("PUBLISH", "c", "first")
            assert subscriber.read().plain == [b"message", b"c", b"first"]
            relay.drop()
            publisher.call("PUBLISH", "c", "lost")
            relay.restore()

            def is_left() -> bool:
                publisher.call("PUBLISH", "c", "again")
                return relay.accepted > 1

            eventually(is_left, awaited="a new connection", interval_s=0.1)
            assert subscriber.read().plain == [b"message", b"c", b"again"]
