"""STATE HISTORY at nodes of a cluster, through a proxy, at workers and at a server of a past moment."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from select import select

import pytest

from compat.conformance.servers import Running, sparkis_server
from compat.conformance.wire import Connection, request
from compat.waiting import WAIT_S_MAX, eventually
from resp_server.pipeline.histories import HISTORIES_MAX
from state_backend.apply.compact import compact_log
from state_backend.log.log_writer import LogWriter
from state_backend.model.clock import iso_text
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from state_backend.model.slots import SLOTS, slot_of
from tests.server.histories import readers_of
from tests.server.nodes import HALVES, Nodes

STATES = [
    StateDescriptor("value", key="k", value="v"),
    StateDescriptor("fields", key="k", field="f", value="v"),
    StateDescriptor("last", key="k", value="v", kind="list"),
    StateDescriptor("tags", key="k", member="m"),
    StateDescriptor("top", key="k", member="m", score="s"),
]
START_MS = 1_700_000_000_000
EPOCHS = 6
TTL_MS = 2_500
KEY = b"job:value:a"
EPOCH_TIMES = [iso_text(START_MS + number * 1000) for number in range(EPOCHS)]


def changes_of(number: int) -> list[Change]:
    """Return an epoch's changes: KEY is its number, but epoch 3 deletes it."""
    name = b"%d" % number
    made = [Change("value", Op.DELETE, KEY) if number == 3 else Change("value", Op.PUT, KEY, value=name)]
    if number == 1:
        made += [
            Change("value", Op.PUT, b"job:value:soon", None, b"x", START_MS + number * 1000 + TTL_MS),
            Change("tags", Op.PUT, b"job:tags:a", b"red", b""),
            Change("top", Op.PUT, b"job:top:a", b"ann", b"1.5"),
        ]
    if number in (1, 2):
        made += [
            Change("fields", Op.PUT, b"job:fields:a", b"f" + name, name),
            Change("last", Op.APPEND, b"job:last:a", value=name),
        ]
    return made


def publish(log: Path, epochs: range) -> None:
    with LogWriter(log, "job", STATES, "query") as writer:
        for number in epochs:
            writer.publish(changes_of(number), clock_ms=START_MS + number * 1000)


class Cluster(Nodes):
    """Two nodes and a proxy. The log reaches back to epoch 0, and has a snapshot of epoch 2."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__(folder, stack, *HALVES)
        publish(self.log, range(3))
        compact_log(str(self.log), "job", retention_ms=10**12)
        publish(self.log, range(3, EPOCHS))
        self.nodes = [self.start(at, "--compact", "no") for at in range(2)]
        self.proxy = self.start_proxy()

    def owner_of(self, key: bytes) -> Running:
        return self.nodes[slot_of(key) * 2 // SLOTS]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(tmp_path_factory.mktemp("cluster"), stack)


@pytest.fixture(params=["node", "proxy"])
def at(cluster: Cluster, request: pytest.FixtureRequest) -> str:
    return str(request.param)


def connected(cluster: Cluster, at: str, key: bytes) -> Connection:
    return (cluster.proxy if at == "proxy" else cluster.owner_of(key)).connect()


def history(client: Connection, *words: bytes | str) -> list[tuple[object, ...]]:
    """Return the rows as tuples, without the names of their fields."""
    found = client.call("STATE", "HISTORY", *words)
    assert not found.is_error, found
    rows = [row.plain for row in found.value]
    for row in rows:
        assert row[::2] == [b"epoch", b"committed_at", b"kind", b"value", b"is_oldest"]
    return [tuple(row[1::2]) for row in rows]


def test_values_of_key_come_with_epoch_and_time_newest_first(cluster: Cluster, at: str) -> None:
    with connected(cluster, at, KEY) as client:
        expected = [
            (number, EPOCH_TIMES[number].encode(), *((None, None) if number == 3 else (b"value", b"%d" % number)), 0)
            for number in reversed(range(EPOCHS))
        ]
        assert history(client, KEY) == expected
        assert history(client, KEY, "count", "3") == expected[:3]


@pytest.mark.parametrize(
    ("key", "kind", "value", "resp3"),
    [
        (b"job:fields:a", b"map", [b"f1", b"1", b"f2", b"2"], "%"),
        (b"job:last:a", b"list", [b"1", b"2"], "*"),
        (b"job:tags:a", b"set", [b"red"], "~"),
        (b"job:top:a", b"sorted-set", [b"ann", b"1.5"], "*"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 3])
def test_value_is_as_its_command_returns_it(
    cluster: Cluster, at: str, key: bytes, kind: bytes, value: list[bytes], resp3: str, protocol: int
) -> None:
    with connected(cluster, at, key) as client:
        client.call("HELLO", protocol)
        found = client.call("STATE", "HISTORY", key, "COUNT", "1")
        [row] = found.value
        assert row.type == ("%" if protocol == 3 else "*")
        assert row.plain[4:6] == [b"kind", kind]
        answer = row.value[3][1] if protocol == 3 else row.value[7]
        assert answer.type == (resp3 if protocol == 3 else "*")
        is_of_pairs = protocol == 3 and kind == b"sorted-set"
        assert answer.plain == ([value] if is_of_pairs else value)


def test_expired_key_has_no_value_from_next_epoch_on(cluster: Cluster, at: str) -> None:
    key = b"job:value:soon"
    with connected(cluster, at, key) as client:
        assert history(client, key) == [
            (4, EPOCH_TIMES[4].encode(), None, None, 0),
            (1, EPOCH_TIMES[1].encode(), b"value", b"x", 0),
        ]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("none:at:all",), "-ERR no state makes keys like 'none:at:all'; STATE JOBS lists the key formats"),
        (("job:value:a", "COUNT", "0"), "-ERR COUNT must be from 1 to 1000"),
        (("job:value:a", "COUNT", "1001"), "-ERR COUNT must be from 1 to 1000"),
        (("job:value:a", "COUNT", "x"), "-ERR value is not an integer or out of range"),
        (("job:value:a", "COUNT"), "-ERR syntax error"),
        (("job:value:a", "LIMIT", "1"), "-ERR syntax error"),
        ((), "-ERR wrong number of arguments for 'state|history' command"),
    ],
)
def test_wrong_request_is_error(cluster: Cluster, at: str, words: tuple[str, ...], error: str) -> None:
    with connected(cluster, at, (words or ("job:value:a",))[0].encode()) as client:
        assert client.call("STATE", "HISTORY", *words).raw.decode() == f"{error}\r\n"


def test_key_that_never_existed_has_empty_history(cluster: Cluster, at: str) -> None:
    with connected(cluster, at, b"job:value:never") as client:
        assert history(client, b"job:value:never") == []


def test_history_needs_read_right_and_no_transaction(cluster: Cluster, at: str) -> None:
    with connected(cluster, at, KEY) as admin, connected(cluster, at, KEY) as client:
        assert admin.call("ACL", "SETUSER", "ann", "on", ">p", "~job:tags:*", "+@read", "+@transaction").plain == b"OK"
        assert client.call("AUTH", "ann", "p").plain == b"OK"
        assert client.call("STATE", "HISTORY", KEY).raw.startswith(b"-NOPERM ")
        admin.call("MULTI")
        assert admin.call("STATE", "HISTORY", KEY).raw == b"-ERR Command not allowed inside a transaction\r\n"
        assert admin.call("EXEC").raw.startswith(b"-EXECABORT ")
        assert admin.call("STATE", "HISTORY", KEY, "COUNT", "1").plain[0][1] == EPOCHS - 1


def test_node_without_slot_replies_moved(cluster: Cluster) -> None:
    owner = cluster.owner_of(KEY)
    (other,) = [each for each in cluster.nodes if each is not owner]
    with other.connect() as client:
        moved = f"-MOVED {slot_of(KEY)} 127.0.0.1:{owner.port}\r\n"
        assert client.call("STATE", "HISTORY", KEY).raw.decode() == moved


def test_replies_of_pipeline_keep_their_order(cluster: Cluster, at: str) -> None:
    with connected(cluster, at, KEY) as client:
        client.send(b"".join([request("GET", KEY), request("STATE", "HISTORY", KEY, "COUNT", 2), request("GET", KEY)]))
        assert client.read().plain == b"5"
        assert [row[1] for row in client.read().plain] == [5, 4]
        assert client.read().plain == b"5"


def stopped_reader(client: Connection, server: Running, others: Collection[int] = ()) -> int:
    """Stop the process that will read the next history, and return its id."""
    assert not client.call("STATE", "HISTORY", KEY).is_error  # it is idle then
    (reader,) = readers_of(server.process.pid) - set(others)
    os.kill(reader, signal.SIGSTOP)
    return reader


def test_server_reads_few_histories_and_none_for_left_clients(cluster: Cluster) -> None:
    server, stopped = cluster.owner_of(KEY), list[int]()
    with ExitStack() as stack:
        clients = [stack.enter_context(server.connect()) for _ in range(HISTORIES_MAX)]
        for client in clients:
            stopped.append(stopped_reader(client, server, stopped))
            client.send(request("PING") + request("STATE", "HISTORY", KEY))
            assert client.read().plain == b"PONG"
        with server.connect() as another:
            busy = f"-TRYAGAIN {HISTORIES_MAX} histories are being read here already; retry in a moment\r\n"
            assert another.call("STATE", "HISTORY", KEY).raw.decode() == busy
            clients[0].__exit__()
            eventually(lambda: readers_of(server.process.pid) == set(stopped[1:]))
            eventually(lambda: len(another.call("STATE", "HISTORY", KEY).value) == EPOCHS)
    eventually(lambda: readers_of(server.process.pid).isdisjoint(stopped))


def test_answered_history_frees_place_in_its_pipeline(cluster: Cluster) -> None:
    server = cluster.owner_of(KEY)
    with server.connect() as other, server.connect() as client:
        reader = stopped_reader(other, server)
        other.send(request("PING") + request("STATE", "HISTORY", KEY))
        assert other.read().plain == b"PONG"
        eventually(
            lambda: not client.call("STATE", "HISTORY", KEY).is_error, awaited="readers of before no longer count"
        )
        client.send(request("STATE", "HISTORY", KEY) * 3)
        assert [len(client.read().value) for _ in range(3)] == [EPOCHS] * 3
    eventually(lambda: reader not in readers_of(server.process.pid))


def test_proxy_queues_few_histories_beside_other_requests(cluster: Cluster) -> None:
    server, asked = cluster.owner_of(KEY), HISTORIES_MAX + 1
    with ExitStack() as stack:
        clients = [stack.enter_context(cluster.proxy.connect()) for _ in range(asked)]
        reader = stopped_reader(clients[0], server)
        for client in clients:
            client.send(request("STATE", "HISTORY", KEY))
        (refused,), _, _ = select(clients, (), (), WAIT_S_MAX)
        busy = f"-TRYAGAIN {HISTORIES_MAX} histories are being read at 127.0.0.1:{server.port}; retry in a moment\r\n"
        assert refused.read().raw.decode() == busy
        assert refused.call("GET", KEY).plain == b"5"
        assert refused.call("DBSIZE").plain == 5
        os.kill(reader, signal.SIGCONT)
        for client in set(clients) - {refused}:
            assert len(client.read().value) == EPOCHS


@pytest.mark.parametrize("workers", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_server_of_past_has_history_up_to_its_moment(tmp_path: Path, workers: str) -> None:
    log, store = tmp_path / "log", tmp_path / "store"
    store.mkdir()
    publish(log, range(2))
    compact_log(str(log), "job", retention_ms=0)
    publish(log, range(2, EPOCHS))
    options = ("--as-of", "2", "--workers", workers)
    with sparkis_server(store, log, *options) as server, server.connect() as client:
        two = (2, EPOCH_TIMES[2].encode(), b"value", b"2", 0)
        assert history(client, KEY) == [two, (1, EPOCH_TIMES[1].encode(), b"value", b"1", 1)]
        for _ in range(2):  # the second newest snapshot remains
            publish(log, range(EPOCHS, EPOCHS + 1))
            compact_log(str(log), "job", retention_ms=0)
        answer = client.call("STATE", "HISTORY", KEY).raw.decode()
        assert answer.startswith("-ERR job 'job': epoch 2 cannot be read any more: the log reaches back to epoch ")
