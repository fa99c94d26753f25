"""MONITOR, SLOWLOG, CONFIG SET and CLIENT PAUSE, whichever process of a server a client is at; and through a proxy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from compat.conformance.dataset import Dataset
from compat.conformance.servers import Running, free_port, sparkis_proxy, sparkis_server, wait_for_keys
from compat.conformance.wire import Connection
from tests.server.nodes import PATIENT

WORKERS = 2


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory, dataset_log: Path, dataset: Dataset) -> Iterator[Running]:
    """A server of two workers."""
    with sparkis_server(tmp_path_factory.mktemp("store"), dataset_log, "--workers", str(WORKERS)) as server:
        wait_for_keys(server, len(dataset.keys))
        yield server


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory, dataset_log: Path, dataset: Dataset) -> Iterator[Running]:
    """A proxy in front of a server."""
    folder, port = tmp_path_factory.mktemp("proxy"), free_port()
    topology = folder / "topology.json"
    nodes = [{"host": "127.0.0.1", "port": port, "slots": "0-16383"}]
    topology.write_text(json.dumps({"version": 1, "nodes": nodes}))
    options = ("--cluster", str(topology), "--cluster-node", f"127.0.0.1:{port}")
    with sparkis_server(folder / "store", dataset_log, *options, port=port), sparkis_proxy(topology, *PATIENT) as found:
        wait_for_keys(found, len(dataset.keys))
        yield found


@pytest.fixture
def pair(workers: Running) -> Iterator[list[Connection]]:
    """A connection at each of two workers, which get new ones in turn."""
    with ExitStack() as stack:
        made = [stack.enter_context(workers.connect()) for _ in range(2)]
        assert [each.call("PING").value for each in made] == [b"PONG", b"PONG"]
        yield made


def monitor_lines(monitor: Connection, last: bytes) -> list[bytes]:
    """Return the requests that a monitor sees, up to one."""
    found: list[bytes] = []
    while not found or last not in found[-1]:
        found.append(monitor.read().value.partition(b"] ")[2])
    return found


def test_monitor_sees_requests_at_all_workers(pair: list[Connection]) -> None:
    for monitor, other in (pair, pair[::-1]):
        assert monitor.call("MONITOR").value == b"OK"
        other.call("GET", "plain")
        other.call("HELLO", "3", "AUTH", "default", "secret")
        other.call("ECHO", "the end")
        lines = monitor_lines(monitor, b"the end")
        assert lines == [b'"GET" "plain"', b'"HELLO" "3" "AUTH" "(redacted)" "(redacted)"', b'"ECHO" "the end"']
        monitor.call("RESET")
        other.call("RESET")


def test_slow_log_is_one_with_ids_of_its_own(pair: list[Connection]) -> None:
    assert pair[0].call("CONFIG", "SET", "slowlog-log-slower-than", "0").value == b"OK"
    try:
        assert pair[1].call("CONFIG", "GET", "slowlog-log-slower-than").plain == [b"slowlog-log-slower-than", b"0"]
        pair[0].call("SLOWLOG", "RESET")
        for number, each in enumerate(pair * 2):
            each.call("ECHO", str(number))
        for each in pair:
            entries = each.call("SLOWLOG", "GET", "-1").value
            echoes = [entry.value[3].plain for entry in entries if entry.value[3].plain[0] == b"ECHO"]
            assert sorted(echoes) == [[b"ECHO", b"%d" % number] for number in range(4)]
            assert len({entry.value[0].value for entry in entries}) == len(entries)
        pair[1].call("SLOWLOG", "RESET")
        assert pair[0].call("SLOWLOG", "LEN").value <= 2  # what came after that
    finally:
        pair[0].call("CONFIG", "SET", "slowlog-log-slower-than", "10000")


def test_statistics_begin_anew_at_all_workers(pair: list[Connection]) -> None:
    for each in pair:
        each.call("GET", "plain")
    assert pair[0].call("CONFIG", "RESETSTAT").value == b"OK"
    text = pair[1].call("INFO", "everything").value
    assert b"keyspace_hits:0\r\n" in text
    assert b"cmdstat_get" not in text


def test_number_of_clients_may_be_changed_for_all_workers(workers: Running, pair: list[Connection]) -> None:
    pair[0].call("CONFIG", "SET", "maxclients", "2")  # there are these already
    try:
        with Connection(workers.port) as refused:
            assert refused.read().raw == b"-ERR max number of clients reached\r\n"
    finally:
        pair[1].call("CONFIG", "SET", "maxclients", "10000")


def test_pause_holds_back_clients_of_all_workers(pair: list[Connection]) -> None:
    for each in pair:
        assert each.call("CLIENT", "PAUSE", "30").value == b"OK"
        assert [other.call("PING").value for other in pair] == [b"PONG", b"PONG"]


def test_histograms_are_added_up(pair: list[Connection]) -> None:
    pair[0].call("CONFIG", "RESETSTAT")
    for each in pair:
        each.call("STRLEN", "plain")
    name, row = pair[0].call("LATENCY", "HISTOGRAM", "strlen").value
    assert (name.value, row.value[1].value) == (b"strlen", 2)


def test_monitor_sees_requests_of_proxy_to_its_servers(proxy: Running) -> None:
    with proxy.connect() as monitor, proxy.connect() as other:
        other.call("GET", "plain")
        assert monitor.call("MONITOR").value == b"OK"
        for line in ("GET plain", "MGET plain number", "DBSIZE", "INFO", "MULTI", "GET plain", "EXEC", "WATCH plain"):
            other.call(*line.split())
        other.call("ECHO", "the end")
        lines = monitor_lines(monitor, b"the end")
        gets = [b'"GET" "plain"', b'"GET" "plain"', b'"MGET" "plain" "number"']
        others = [b'"DBSIZE"', b'"INFO"', b'"MULTI"', b'"exec"', b'"WATCH" "plain"', b'"ECHO" "the end"']
        assert sorted(lines) == sorted([*gets, *others])
        assert monitor.call("GET", "plain").raw == b"-ERR Replica can't interact with the keyspace\r\n"
    with proxy.connect() as other:
        assert other.call("GET", "plain").raw.startswith(b"$")


def test_proxy_measures_requests_that_it_answers_itself(proxy: Running) -> None:
    with proxy.connect() as connection:
        connection.call("CONFIG", "RESETSTAT")
        for line in ("PING", "GET plain", "TIME"):
            connection.call(*line.split())
        measured = connection.call("INFO", "latencystats").plain.decode()
        assert re.findall(r"usec_(\w+):", measured) == ["ping", "time"]


def test_proxy_has_slow_log_and_settings_of_its_own(proxy: Running) -> None:
    with proxy.connect() as connection:
        assert connection.call("CONFIG", "SET", "slowlog-log-slower-than", "0").value == b"OK"
        connection.call("ECHO", "x")
        assert connection.call("SLOWLOG", "GET", "1").value[0].value[3].plain == [b"ECHO", b"x"]
        connection.call("CONFIG", "SET", "slowlog-log-slower-than", "10000")
        text = connection.call("INFO", "everything").value
        assert b"avg_ttl=" in text
        assert b"sparkis_store_bytes:" in text
