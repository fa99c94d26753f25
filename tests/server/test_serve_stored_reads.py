"""The proxy of `sparkis serve --upstream` answers reads of stored keys itself, as the state server would."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import hypothesis.strategies as st
import lmdb
import pytest
from hypothesis import given, settings

from compat.conformance.servers import CONTROL_TOKEN, Running, sparkis_program
from compat.conformance.wire import Connection, request
from compat.examples import examples
from compat.fork_server import STARTS
from compat.waiting import eventually
from resp_server.net.client import Client
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from tests.meanwhile import meanwhile, repeated
from tests.server.caching import CachingClient, turns_of
from tests.server.overlay import ABSENT, OLD, VALUES
from tests.server.served_upstream import PROGRAM, Scene, StateServer, state_server_of, wait_until_ready

pytestmark = pytest.mark.compiled

COUNT = StateDescriptor("count", key="car", value="n")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with ExitStack() as stack:
        # The password of a state server is in its own environment only.
        stack.enter_context(pytest.MonkeyPatch.context()).setenv(STARTS, "yes")
        yield Scene(tmp_path_factory.mktemp("scene"), stack)


@pytest.fixture(scope="module")
def server(scene: Scene) -> Running:
    return scene.start("stored")


@pytest.fixture
def client(server: Running) -> Iterator[Connection]:
    with server.connect() as connection:
        wait_until_ready(connection)
        yield connection


def test_stored_keys_are_read_here_and_all_else_by_state_server(server: Running, client: Connection) -> None:
    state_server = StateServer(server, client)
    eventually(lambda: state_server.is_spared(client, "job:speed:1"))
    there = state_server.gets()
    assert [client.call("GET", key).plain for key in ("job:speed:1", "dash/7/apdex")] == [b"10", b"0.9"]
    assert state_server.gets() == there
    assert client.call("GET", ABSENT).plain is None  # its name says whose key it would be
    assert state_server.gets() == there
    assert client.call("GET", "dash/8/apdex").plain is None  # it may be a key of another job
    assert state_server.gets() == there + 1
    client.call("SELECT", 1)
    assert client.call("GET", "job:speed:1").plain is None  # another database is the upstream's
    client.call("SELECT", 0)
    client.call("MULTI")
    client.call("GET", "job:speed:1")
    assert client.call("EXEC").plain == [b"10"]
    client.call("HELLO", 3)
    client.call("CLIENT", "TRACKING", "ON")
    assert client.call("GET", "job:speed:1").plain == b"10"
    assert state_server.gets() == there + 1
    client.call("CLIENT", "TRACKING", "OFF")


def test_monitor_sees_reads_of_stored_keys(server: Running, client: Connection) -> None:
    with server.connect() as monitor:
        assert monitor.call("MONITOR").plain == b"OK"
        client.call("GET", "job:speed:3")
        assert b'"GET" "job:speed:3"' in monitor.read().raw


keys = st.sampled_from([*VALUES, ABSENT, b"mine:1", b"mine:2"])
words = st.one_of(
    st.tuples(st.sampled_from([b"GET", b"get", b"STRLEN", b"TTL", b"TYPE", b"HGETALL", b"EXISTS"]), keys),
    st.tuples(st.just(b"HGET"), keys, st.just(b"f")),
    st.lists(keys, min_size=1, max_size=4).map(lambda some: (b"MGET", *some)),
    st.lists(keys, min_size=1, max_size=4).map(lambda some: (b"EXISTS", *some)),
    st.just((b"PING",)),
    st.just((b"GET",)),
)


@pytest.fixture(scope="module")
def plain(scene: Scene) -> Iterator[Connection]:
    """A client of a server without an upstream, for the same log."""
    options = ("--port", "0", "--log", str(scene.log), "--store", str(scene.folder / "plain"))
    with sparkis_program(PROGRAM, *options) as server, server.connect() as connection:
        eventually(lambda: connection.call("GET", "job:speed:1").plain == b"10")
        yield connection


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(words, min_size=1, max_size=12), st.lists(st.integers(0, 1 << 10), max_size=4), st.booleans())
def test_pipeline_of_both_backends_is_answered_as_each_of_them_answers(
    scene: Scene, server: Running, plain: Connection, sent: list[tuple[bytes, ...]], cuts: list[int], is_resp3: bool
) -> None:
    expected = []
    with scene.upstream.connect() as upstream, server.connect() as client:
        upstream.call("SET", "mine:1", "1")
        for connection in (upstream, plain, client):
            connection.call("HELLO", 3 if is_resp3 else 2)
        for each in sent:
            named = each[1:2] if each[0] == b"HGET" else each[1:]
            sides = [plain if key in VALUES or key == ABSENT else upstream for key in named]
            if len(set(map(id, sides))) > 1:
                each_reply = [side.call(each[0], key) for key, side in zip(named, sides, strict=True)]
                total = sum(reply.value for reply in each_reply) if each[0] == b"EXISTS" else None
                values = b"".join(reply.raw.partition(b"\r\n")[2] for reply in each_reply)
                expected.append(b":%d\r\n" % total if total is not None else b"*%d\r\n%b" % (len(named), values))
            else:
                expected.append((sides[0] if sides else upstream).call(*each).raw)
        data = b"".join(request(*each) for each in sent)
        ends = sorted({len(data), *(cut % (len(data) + 1) for cut in cuts)})
        start = 0
        for end in ends:
            client.send(data[start:end])
            start = end
        assert [client.read().raw for _ in sent] == expected


class Counter:
    """A job whose keys all have the number of the last epoch."""

    def __init__(self, log: Path, generation: str, number: int = 0) -> None:
        self._writer = LogWriter(log, "job2", [COUNT], generation, takeover=True)
        self.number = number

    @property
    def epoch(self) -> int:
        assert self._writer.last is not None
        return self._writer.last.epoch

    def next(self, cars: int = 3) -> None:
        self.number += 1
        self._writer.publish(
            [Change("count", Op.PUT, b"job2:count:%d" % car, value=b"%d" % self.number) for car in range(cars)]
        )


def numbers_of(client: Connection, choice: random.Random) -> list[int]:
    """Send a pipeline of reads, some of which only the state server answers; return the numbers in their order."""
    sent: list[tuple[str, ...]] = choice.choices(
        [
            ("GET", "job2:count:0"),
            ("GET", "job2:count:1"),
            ("MGET", "job2:count:0", "job2:count:2"),
            ("MGET", "job2:count:0", "job2:count:absent", "job2:count:1"),
            ("GETRANGE", "job2:count:2", "0", "-1"),
        ],
        k=choice.randrange(1, 6),
    )
    if choice.random() < 0.2:
        sent += [("MULTI",), ("GET", "job2:count:0"), ("GETRANGE", "job2:count:1", "0", "-1"), ("EXEC",)]
    client.send(b"".join(request(*words) for words in sent))
    found: list[int] = []
    for _ in sent:
        reply = client.read().plain
        values = reply if isinstance(reply, list) else [reply]
        found += [int(each) for each in values if each is not None and each.isdigit()]
    return found


def of_another_log(scene: Scene, name: str) -> tuple[Counter, list[str]]:
    """Return the writer of another log, which has its first epoch, and the options of a server of it."""
    counter = Counter(scene.folder / name, "first")
    counter.next()
    options = scene.options(f"{name}-store")
    options[options.index("--log") + 1] = str(scene.folder / name)
    return counter, options


@pytest.mark.kill
@pytest.mark.parametrize("workers", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_epochs_never_go_back_during_kills_and_new_generation(scene: Scene, workers: str) -> None:
    counter, options = of_another_log(scene, f"log{workers}")
    choice, seen = random.Random(7), 0
    program = sparkis_program(PROGRAM, "--port", "0", *options, "--workers", workers)
    with program as server, server.connect() as client:
        eventually(lambda: client.call("GET", "job2:count:0").plain == b"1")
        for turn in range(60):
            if turn == 30:
                os.kill(state_server_of(server.process.pid), signal.SIGKILL)
            if turn == 45:
                counter = Counter(scene.folder / f"log{workers}", "second", counter.number)
            counter.next()
            for _ in range(20):
                found = numbers_of(client, choice)
                assert found == sorted(found), found
                assert not found or found[0] >= seen
                seen = max([seen, *found])
        eventually(lambda: client.call("GET", "job2:count:0").plain == b"%d" % counter.number)
        if workers == "1":
            state_server = StateServer(server, client)
            eventually(lambda: state_server.is_spared(client, "job2:count:0"))


@pytest.mark.parametrize(
    "options",
    [
        (),
        (b"BCAST",),
        (b"OPTIN",),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ((b"NOLOOP",), (b"OPTOUT",))),
    ],
    ids=lambda options: b" ".join(options).decode(),
)
def test_cached_values_are_not_older_than_other_clients_reads(scene: Scene, options: tuple[bytes, ...]) -> None:
    counter, arguments = of_another_log(scene, "cached" + b"".join(options).decode())
    keys = [b"job2:count:%d" % car for car in range(3)]
    with sparkis_program(PROGRAM, "--port", "0", *arguments) as server, server.connect() as plain:
        eventually(lambda: plain.call("GET", "job2:count:0").plain == b"1")
        caching = [CachingClient(server.port, *options) for _ in range(3)]
        with meanwhile(repeated(counter.next)):
            for turn in turns_of(caching):
                for client in caching:
                    newest = int(plain.call("GET", "job2:count:0").plain)
                    client.read(keys, is_in_transaction=turn % 5 == 4)
                    assert min(client.cache.values()) >= newest
        assert all(client.pushes for client in caching)
        for client in caching:
            eventually(partial(client.holds_only, dict.fromkeys(keys, counter.number)))
            client.close()


def test_tracked_missing_key_is_invalidated_when_added(scene: Scene) -> None:
    counter, options = of_another_log(scene, "added")
    with sparkis_program(PROGRAM, "--port", "0", *options) as server, server.connect() as client:
        eventually(lambda: client.call("GET", "job2:count:0").plain == b"1")
        state_server = StateServer(server, client)
        eventually(lambda: state_server.is_spared(client, "job2:count:0"))
        client.call("HELLO", 3)
        client.call("CLIENT", "TRACKING", "ON")
        there = state_server.gets()
        assert client.call("GET", "job2:count:3").plain is None
        assert state_server.gets() == there
        counter.next(cars=4)
        assert client.read().plain == [b"invalidate", [b"job2:count:3"]]
        assert client.call("GET", "job2:count:3").plain == b"2"


def test_awaited_epoch_is_read_beside_busy_client(scene: Scene) -> None:
    counter, options = of_another_log(scene, "awaited")
    program = sparkis_program(PROGRAM, "--port", "0", *options)
    with program as server, server.connect() as client, server.connect() as other:
        eventually(lambda: client.call("GET", "job2:count:0").plain == b"1")
        flood = repeated(lambda: other.call_each(*["GET job2:count:1"] * 200))
        with Client("127.0.0.1", server.control_port, password=CONTROL_TOKEN) as driver, meanwhile(flood):
            for _ in range(15):
                counter.next()
                assert driver.call("WAIT", "job2", str(counter.epoch), "60000") == 1
                assert client.call("GET", "job2:count:0").plain == b"%d" % counter.number


def test_idle_proxy_pins_no_old_epoch(scene: Scene) -> None:
    counter, options = of_another_log(scene, "idle")
    with sparkis_program(PROGRAM, "--port", "0", *options) as server, server.connect() as client:
        eventually(lambda: client.call("GET", "job2:count:0").plain == b"1")
        state_server = StateServer(server, client)
        eventually(lambda: state_server.is_spared(client, "job2:count:0"))
        (data,) = (scene.folder / "idle-store").glob("job2/*/data.mdb")
        with lmdb.open(str(data.parent), readonly=True, max_dbs=16) as store:
            before = transactions_of(store, server.process.pid)
            counter.next()
            assert before
            eventually(lambda: min(transactions_of(store, server.process.pid)), lambda found: found > max(before))


def transactions_of(store: lmdb.Environment, pid: int) -> list[int]:
    """Return the transactions that a process reads."""
    rows = [line.split() for line in store.readers().splitlines()[1:]]
    return [int(row[2]) for row in rows if row[0] == str(pid) and row[2] != "-"]


def test_released_job_is_read_at_upstream_at_once(scene: Scene, server: Running, client: Connection) -> None:
    assert not client.call("STATE", "RELEASE", "job").is_error
    assert [client.call("GET", f"job:speed:{car}").plain for car in (1, 2)] == [OLD, OLD]
    assert not client.call("STATE", "CONFIRM", "job").is_error
    assert [client.call("GET", f"job:speed:{car}").plain for car in (1, 2)] == [b"10", b"20"]
