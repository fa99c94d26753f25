"""A server whose stores lack slots that it shows: clients get an error to try again after, never a wrong reply."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resp_server.cluster.node_view import NodeView
from resp_server.cluster.topology import Topology
from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import SlotLoadingError
from state_backend.model.records import Change, Op, runs_of
from state_backend.model.slot_set import ALL, SlotSet
from state_backend.model.slots import slot_of
from state_backend.store.keyspace import Job, Keyspace
from state_backend.store.slot_ownership import Loading
from state_backend.store.store import EpochChanges

NOW_MS = 1_700_000_000_000
HERE, THERE = "10.0.0.1:1", "10.0.0.2:2"
LOW, HIGH = SlotSet.parse("0-8191"), SlotSet.parse("8192-16383")
STATE = StateDescriptor("s", key="k", value="v")
KEYS = [b"job:s:%d" % number for number in range(200)]
REFUSED = b"-CLUSTERDOWN Hash slot not served: "


def keys_in(slots: SlotSet) -> list[bytes]:
    return [key for key in KEYS if slot_of(key) in slots]


A_LOW, A_HIGH = keys_in(LOW)[0].decode(), keys_in(HIGH)[0].decode()


def topology(version: int, here: SlotSet) -> Topology:
    rows = [(HERE, str(here)), (THERE, str(ALL - here))]
    nodes = [{"host": name[:-2], "port": int(name[-1]), "slots": slots} for name, slots in rows]
    return Topology.of_json({"version": version, "nodes": nodes})


class Node:
    """A client of a server, and what its store and its cluster do meanwhile."""

    def __init__(self, client: Any, store: LmdbStore, owned: SlotSet) -> None:
        self.client = client
        self.store = store
        self.store.own(owned)
        self.store.apply(self._changes(0, owned), [STATE])
        self._version = 0

    @staticmethod
    def _changes(epoch: int, slots: SlotSet) -> EpochChanges:
        changes = [Change("s", Op.PUT, key, None, b"0") for key in keys_in(slots)]
        return EpochChanges(epoch, 1, NOW_MS, list(runs_of(changes, ["s"])))

    def lose(self, slots: SlotSet) -> None:
        self.store.own(self.store.slot_ownership.owned - slots)
        self.client.server.renew()

    def gain(self, slots: SlotSet) -> None:
        self.store.own(self.store.slot_ownership.owned | slots)
        applied = self.store.applied
        then = Loading(slots, applied.epoch, applied.term, applied.clock_ms)
        self.store.load(self._changes(applied.epoch, slots), [STATE], then)
        self.client.server.renew()

    def stand(self, slots: SlotSet) -> None:
        self._version += 1
        self.client.server.become_node(NodeView(topology(self._version, slots), HERE))

    def ask(self, line: str) -> Any:
        try:
            return self.client.ask(line)
        except SlotLoadingError as error:  # in the first step of a reply: connections answer so
            return self.client.pipeline.error_reply(error)

    def gets(self, *keys: bytes) -> Any:
        return self.client.send_buffer(*([b"GET", key] for key in keys))

    def reply_to(self, *words: bytes) -> Any:
        """Return a reply as it is before its steps are taken."""
        return self.client.pipeline.reply_to(self.client.call, list(words))


@pytest.fixture
def store(tmp_path: Path) -> LmdbStore:
    return LmdbStore(tmp_path / "store", "g")


@pytest.fixture
def keyspace(store: LmdbStore) -> Keyspace:
    keyspace = Keyspace()
    keyspace.put(Job("job", "g", [STATE], store, committed_epoch=0, is_stale=False))
    return keyspace


@pytest.fixture
def node(client: Any, store: LmdbStore) -> Callable[[SlotSet], Node]:
    return lambda owned: Node(client, store, owned)


def refusal(key: bytes) -> bytes:
    return REFUSED + b"slot %d of job 'job' is not loaded here yet, retry in a moment\r\n" % slot_of(key)


# What keys are asked for, and what asks for all keys.
ABOUT_KEY = [
    *(f"{name} {A_HIGH}" for name in ("GET", "MGET", "EXISTS", "TOUCH", "TYPE", "TTL", "STRLEN", "HGETALL", "LLEN")),
    *(f"{name} {A_HIGH} 0 1" for name in ("LRANGE", "GETRANGE")),
    *(f"{name} {A_HIGH} f" for name in ("HGET", "HMGET")),
    f"HSCAN {A_HIGH} 0",
    f"STATE LOCATE {A_HIGH}",
]
ABOUT_ALL_KEYS = ["DBSIZE", "KEYS *", "SCAN 0", "RANDOMKEY", "STATE JOBS", "STATE LIST job"]
ABOUT_SLOT = [f"CLUSTER {name} {slot_of(A_HIGH.encode())}" for name in ("COUNTKEYSINSLOT", "GETKEYSINSLOT")]
WITHOUT_KEY = ["PING", "STATE LAG", "STATE DESCRIBE job:s", "INFO", "COMMAND COUNT", f"GET {A_LOW}"]


@pytest.mark.parametrize("shown", [ALL, ALL - SlotSet.parse("0-9")], ids=["all slots", "some slots"])
@pytest.mark.parametrize("request_sent", [*ABOUT_KEY, *ABOUT_ALL_KEYS, ABOUT_SLOT[0], f"{ABOUT_SLOT[1]} 10"])
def test_node_refuses_slots_it_is_loading(node: Callable[[SlotSet], Node], request_sent: str, shown: SlotSet) -> None:
    here = node(LOW)
    here.stand(shown)
    assert here.ask(request_sent).startswith(REFUSED)
    here.gain(HIGH)
    assert not here.ask(request_sent).startswith((REFUSED, b"-LOADING", b"-ERR"))


@pytest.mark.parametrize("request_sent", [*ABOUT_KEY, *ABOUT_ALL_KEYS])
def test_server_outside_cluster_replies_loading(node: Callable[[SlotSet], Node], request_sent: str) -> None:
    assert node(LOW).ask(request_sent).startswith(b"-LOADING ")


@pytest.mark.parametrize("request_sent", WITHOUT_KEY)
def test_owned_slots_are_answered_while_others_are_missing(node: Callable[[SlotSet], Node], request_sent: str) -> None:
    here = node(LOW)
    here.stand(ALL)
    assert not here.ask(request_sent).startswith(b"-")


def test_each_request_of_buffer_is_answered_by_itself(node: Callable[[SlotSet], Node]) -> None:
    here = node(LOW)
    here.stand(ALL)
    expected = b"".join(b"$1\r\n0\r\n" if slot_of(key) in LOW else refusal(key) for key in KEYS)
    for _ in range(3):  # some replies are held by then
        assert here.gets(*KEYS) == expected


def test_held_reply_is_not_sent_once_its_slot_is_lost(node: Callable[[SlotSet], Node]) -> None:
    here = node(ALL)
    here.stand(ALL)
    for _ in range(3):
        assert here.gets(*KEYS) == b"$1\r\n0\r\n" * len(KEYS)
    here.lose(HIGH)
    assert here.gets(A_HIGH.encode()) == refusal(A_HIGH.encode())
    assert here.gets(*keys_in(LOW)) == b"$1\r\n0\r\n" * len(keys_in(LOW))


def test_loaded_slot_of_another_node_is_moved(node: Callable[[SlotSet], Node]) -> None:
    here = node(ALL)
    here.stand(LOW)
    assert here.gets(A_HIGH.encode()) == b"-MOVED %d 10.0.0.2:2\r\n" % slot_of(A_HIGH.encode())
    assert here.gets(A_LOW.encode()) == b"$1\r\n0\r\n"
    here.lose(HIGH)
    assert here.gets(A_HIGH.encode()).startswith(b"-MOVED")


def test_present_slot_is_readable_with_its_topology(
    node: Callable[[SlotSet], Node],
) -> None:
    here = node(ALL)
    here.stand(LOW)
    here.gets(*KEYS)
    here.stand(ALL)
    assert here.gets(*KEYS) == b"$1\r\n0\r\n" * len(KEYS)


def test_node_with_exactly_its_slots_counts_at_once(node: Callable[[SlotSet], Node]) -> None:
    here = node(LOW)
    here.stand(LOW)
    count = b":%d\r\n" % len(keys_in(LOW))
    assert here.reply_to(b"DBSIZE") == count
    here.gain(HIGH)  # now it counts them one by one
    assert not isinstance(here.reply_to(b"DBSIZE"), bytes)
    assert here.ask("DBSIZE") == count


def test_node_scans_its_slots_for_keys_of_kind(node: Callable[[SlotSet], Node]) -> None:
    here = node(ALL)
    here.stand(LOW)
    assert here.ask("SCAN 0 COUNT 1000 TYPE string").startswith(b"*2\r\n$1\r\n0\r\n*%d\r\n" % len(keys_in(LOW)))
    assert here.ask("SCAN 0 COUNT 1000 TYPE list") == b"*2\r\n$1\r\n0\r\n*0\r\n"


def test_reply_in_steps_stays_at_slots_that_were_owned(node: Callable[[SlotSet], Node]) -> None:
    here = node(ALL)
    here.stand(ALL)
    later = here.reply_to(b"KEYS", b"*")
    here.lose(HIGH)
    assert here.client.drain(later).startswith(b"*%d\r\n" % len(KEYS))
    assert here.ask("KEYS *").startswith(REFUSED)
