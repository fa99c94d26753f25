"""Keys whose rule is prefer-state: one side answers the whole key, the states if they have it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from compat.conformance.servers import Running
from compat.conformance.wire import Connection
from compat.waiting import eventually
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from tests.server.swap import ABSENT, OLD, STATES, VALUES, Swap

RULES = '[[rule]]\nname = "aside"\nkeys = "job:speed:<car>"\nowner = "prefer-state"\n'
MIXED = ["job:speed:1", "job:speed:absent", "dash/7/apdex", "a", "job:speed:none", "job:speed:2"]


class PreferringSwap(Swap):
    """A swap whose proxy prefers the states for some keys."""

    def start_swap(self, *options: str, is_ready: bool = True) -> Running:
        routes = self.folder / "routes.toml"
        routes.write_text(RULES)
        return super().start_swap("--routes", str(routes), *options, is_ready=is_ready)


@pytest.fixture(scope="module")
def swap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PreferringSwap]:
    with ExitStack() as stack:
        yield PreferringSwap(tmp_path_factory.mktemp("swap"), stack)


@pytest.fixture
def client(swap: PreferringSwap) -> Iterator[Connection]:
    with swap.proxy.connect() as connection:
        connection.call("SET", "a", "mine")
        yield connection


@pytest.mark.parametrize("protocol", [2, 3])
def test_preferred_key_is_answered_by_states_else_by_upstream(client: Connection, protocol: int) -> None:
    client.call("HELLO", protocol)
    assert client.call("GET", "job:speed:1").plain == b"10"
    assert client.call("GET", ABSENT).plain == OLD
    assert client.call("GET", "job:speed:none").plain is None
    assert client.call("STRLEN", ABSENT).plain == len(OLD)
    assert client.call("TYPE", "job:speed:none").plain == b"none"
    assert client.call("OBJECT", "ENCODING", "job:speed:1").plain == b"int"
    assert client.call("LRANGE", "job:speed:1", 0, -1).plain.startswith(b"WRONGTYPE")


def test_preferred_keys_of_long_read_are_split(client: Connection) -> None:
    assert client.call("MGET", *MIXED * 200).plain == [b"10", OLD, b"0.9", b"mine", None, b"20"] * 200
    assert client.call("EXISTS", *MIXED * 200).plain == 5 * 200


@pytest.mark.parametrize("protocol", [2, 3])
def test_preferred_keys_of_read_are_split_key_by_key(client: Connection, protocol: int) -> None:
    client.call("HELLO", protocol)
    assert client.call("MGET", *MIXED).plain == [b"10", OLD, b"0.9", b"mine", None, b"20"]
    assert client.call("EXISTS", *MIXED).plain == client.call("TOUCH", *MIXED).plain == 5
    assert client.call("MGET", *MIXED[:2]).plain == [b"10", OLD]
    # The longest request that is not split in portions.
    many = [f"job:speed:{number}" for number in range(1023)]
    assert client.call("MGET", *many).plain == [b"%d" % (10 * number) for number in range(8)] + [None] * 1015


def test_preferred_key_write_is_hidden_while_states_have_the_key(swap: PreferringSwap, client: Connection) -> None:
    client.send(b"SET job:speed:7 new\r\nGET job:speed:7\r\nSET job:speed:900 1\r\nINCR job:speed:900\r\n")
    client.send(b"GET job:speed:900\r\nDEL job:speed:900 job:speed:7\r\nGET job:speed:900\r\nGET job:speed:7\r\n")
    assert [client.read().plain for _ in range(8)] == [b"OK", b"70", b"OK", 2, b"2", 2, None, b"70"]
    assert client.call("MSET", "job:speed:5", "x", "dash/7/apdex", "y").is_error
    with swap.upstream.connect() as upstream:
        assert upstream.call("GET", "job:speed:5").plain == OLD


def test_preferred_key_of_new_state_hides_upstreams(swap: PreferringSwap, client: Connection) -> None:
    states = [StateDescriptor("total", key_format="sum:<x>", value="n")]
    assert client.call("SET", "sum:1", "written").plain == b"OK"
    (swap.folder / "routes.toml").write_text(RULES + '[[rule]]\nkeys = "sum:<x>"\nowner = "prefer-state"\n')
    assert client.call("STATE", "RELOAD").plain == 2
    with LogWriter(swap.log, "other", states, "first-of-other") as writer:
        assert client.call("GET", "sum:1").plain == b"written"
        writer.publish([Change("total", Op.PUT, b"sum:1", value=b"1")])
        eventually(lambda: client.call("GET", "sum:1").plain == b"1")
        writer.publish([Change("total", Op.DELETE, b"sum:1")])
        eventually(lambda: client.call("GET", "sum:1").plain == b"written")
    assert swap.info()["ownership_waiting"] == ""


def test_preferred_key_is_never_nil_while_states_get_and_lose_it(swap: PreferringSwap, client: Connection) -> None:
    client.call("SET", "flip:1", "upstream's")
    (swap.folder / "routes.toml").write_text(RULES + '[[rule]]\nkeys = "flip:<x>"\nowner = "prefer-state"\n')
    assert client.call("STATE", "RELOAD").plain == 2
    states = [StateDescriptor("flip", key_format="flip:<x>", value="n")]
    found: set[bytes] = set()
    with LogWriter(swap.log, "flips", states, "first-of-flips") as writer:
        for number in range(60):
            writer.publish([Change("flip", Op.DELETE if number % 2 else Op.PUT, b"flip:1", value=b"state's")])
            client.send(b"GET flip:1\r\n" * 50)
            found |= {client.read().plain for _ in range(50)}
        writer.publish([Change("flip", Op.PUT, b"flip:1", value=b"state's")])
        eventually(lambda: client.call("GET", "flip:1").plain == b"state's")
    assert found <= {b"upstream's", b"state's"}


def test_preferred_keys_are_listed_once(client: Connection) -> None:
    found = client.call("KEYS", "job:speed:*").plain
    assert len(found) == len(set(found)) and {*VALUES, ABSENT} - {b"dash/7/apdex"} <= set(found)
    seen, cursor = set(), b"0"
    while cursor != b"0" or not seen:
        cursor, keys = client.call("SCAN", cursor, "COUNT", 1000).plain
        seen |= set(keys)
    assert {*VALUES, ABSENT, b"a"} <= seen


@pytest.mark.parametrize(
    ("line", "before", "after"),
    [
        ("SUNION job:speed:1 a", "command 'sunion' needs its keys on one side: ", ", key 'a' is the upstream's"),
        ("XREAD BLOCK 0 STREAMS job:speed:1 0", "command 'xread' cannot block: ", ""),
    ],
)
def test_preferred_key_in_unsplittable_read_is_error(client: Connection, line: str, before: str, after: str) -> None:
    whose = "key 'job:speed:1' is a state's if it has the key, by the rule 'aside'"
    assert client.call(*line.split(" ")).plain.decode() == f"ERR {before}{whose}{after}"


@pytest.mark.parametrize("protocol", [2, 3])
def test_preferred_keys_within_transaction_are_decided_one_by_one(client: Connection, protocol: int) -> None:
    client.call("HELLO", protocol)
    lines = [["SET", "a", "1"], ["GET", "job:speed:1"], ["GET", ABSENT], ["MGET", *MIXED], ["EXISTS", *MIXED]]
    lines += [["LRANGE", "job:speed:1", 0, -1], ["LRANGE", ABSENT, 0, -1], ["XRANGE", "job:speed:1", "-", "+"]]
    lines += [["XRANGE", "job:speed:none", "-", "+"], ["MGET", "job:speed:2", "job:speed:1"], ["GET", "a"]]
    client.call("MULTI")
    assert {client.call(*line).plain for line in lines} == {b"QUEUED"}
    found = client.call("EXEC").plain
    assert found[:5] == [b"OK", b"10", OLD, [b"10", OLD, b"0.9", b"1", None, b"20"], 5]
    assert found[5].startswith(b"WRONGTYPE") and found[6].startswith(b"WRONGTYPE")
    assert found[7].endswith(b"and the states have it") and found[8:] == [[], [b"20", b"10"], b"1"]


def test_preferred_key_is_watched_at_both_backends(swap: PreferringSwap, client: Connection) -> None:
    with swap.upstream.connect() as upstream, swap.proxy.connect() as reader:
        assert client.call("WATCH", "job:speed:6", "dash/7/apdex").plain == b"OK"
        upstream.call("SET", "job:speed:6", "another")
        client.call("MULTI")
        client.call("GET", "a")
        assert client.call("EXEC").plain is None
        assert client.call("WATCH", "job:speed:6", "a").plain == b"OK"
        with LogWriter(swap.log, "job", STATES, "first") as writer:
            writer.publish([Change("speed", Op.PUT, b"job:speed:6", value=b"61")])
            eventually(lambda: reader.call("GET", "job:speed:6").plain == b"61")
            client.call("MULTI")
            client.call("GET", "a")
            assert client.call("EXEC").plain is None
            writer.publish([Change("speed", Op.PUT, b"job:speed:6", value=b"60")])
        eventually(lambda: reader.call("GET", "job:speed:6").plain == b"60")


def test_preferred_key_read_without_states_command_is_upstreams_unless_states_have_it(client: Connection) -> None:
    assert client.call("XRANGE", "job:speed:none", "-", "+").plain == []
    assert client.call("XRANGE", "job:speed:1", "-", "+").plain == (
        b"ERR key 'job:speed:1' is a state's if it has the key, by the rule 'aside', and the states have it"
    )


def test_preferred_key_of_states_survives_paused_upstream(swap: PreferringSwap) -> None:
    with swap.proxy.connect() as client:
        swap.signal_upstream(signal.SIGSTOP)
        try:
            for number in range(1, 8):
                assert client.call("GET", f"job:speed:{number}").plain == VALUES[b"job:speed:%d" % number]
        finally:
            swap.signal_upstream(signal.SIGCONT)
        assert client.call("GET", ABSENT).plain == OLD
