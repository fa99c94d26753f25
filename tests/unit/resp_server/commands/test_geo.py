"""Searches of places: small ones at once, large ones in steps; the scanned members, and the memory of a search."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from compat.conformance.wire import Reply, reply_at
from resp_server.commands import geo, sliced_reply
from resp_server.pipeline.context import ServerContext
from resp_server.settings.server import ServerConfig
from state_backend.codec.geohash import Circle, distance, point_of, score_of
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from state_backend.store.keyspace import Job, Keyspace
from state_backend.store.memory_store import MemorySnapshot, MemoryStore
from tests.builders import apply_epoch
from tests.unit.resp_server.commands.stepping import SteppingClient
from tests.unit.resp_server.conftest import NOW_MS, TABLE

STATES = [StateDescriptor("at", member="member", score="score", key_format="at:<key>")]
MANY = 5000
RANDOM = Random(14)
PLACES = {b"m%04d" % number: (RANDOM.uniform(-180, 180), RANDOM.uniform(-85, 85)) for number in range(MANY)}
SCORES = {member: score_of(*place) for member, place in PLACES.items()}
TWINS = {b"twin%d" % number: score_of(10, 50) for number in range(9)}


@pytest.fixture(scope="module")
def keyspace() -> Keyspace:
    changes = [
        *(Change("at", Op.PUT, b"at:many", field=member, value=b"%d" % score) for member, score in SCORES.items()),
        *(Change("at", Op.PUT, b"at:twins", field=member, value=b"%d" % score) for member, score in TWINS.items()),
    ]
    store = MemoryStore("g1")
    apply_epoch(store, STATES, changes, 0, clock_ms=NOW_MS)
    found = Keyspace()
    found.put(Job("job", "g1", STATES, store, is_stale=False))
    return found


@pytest.fixture
def client(keyspace: Keyspace) -> SteppingClient:
    return SteppingClient(ServerContext(ServerConfig(), keyspace, TABLE, clock=lambda: NOW_MS))


def ask(client: SteppingClient, line: str) -> Reply:
    """Return the reply to one request."""
    raw = client.ask(line)
    reply, end = reply_at(raw, 0)
    assert end == len(raw), line
    return reply


def by_distance(center: tuple[float, float]) -> list[bytes]:
    """Return all members, the nearest first."""
    return sorted(SCORES, key=lambda member: distance(center, point_of(SCORES[member])))


@pytest.mark.parametrize("count", [1, 100, geo.NEAREST_MAX, geo.NEAREST_MAX + 1, MANY + 1])
def test_nearest_are_those_that_sorting_all_finds(client: SteppingClient, count: int) -> None:
    line = f"GEOSEARCH at:many FROMLONLAT 20 10 BYRADIUS 30000 km COUNT {count}"
    nearest = by_distance((20, 10))
    assert ask(client, line).plain == nearest[:count]
    assert ask(client, f"{line} DESC").plain == nearest[::-1][:count]


def test_places_at_equal_distance_are_in_order_of_their_bytes(client: SteppingClient) -> None:
    for order in ("", "ASC", "DESC", "COUNT 9", "COUNT 9 DESC"):
        assert ask(client, f"GEOSEARCH at:twins FROMLONLAT 10 50 BYRADIUS 1 km {order}".rstrip()).plain == sorted(TWINS)


def test_small_search_of_large_set_reads_few_members(client: SteppingClient, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = 0
    read = MemorySnapshot.sorted_members

    def counted(self: MemorySnapshot, *arguments: object) -> Iterator[tuple[bytes, float]]:
        nonlocal looked_at
        for pair in read(self, *arguments):  # type: ignore[arg-type]
            looked_at += 1
            yield pair

    monkeypatch.setattr(MemorySnapshot, "sorted_members", counted)
    found = ask(client, "GEOSEARCH at:many FROMLONLAT 20 10 BYRADIUS 500 km ASC").plain
    shape = Circle((20, 10), 500_000)
    within = [member for member in by_distance((20, 10)) if shape.distance(point_of(SCORES[member])) is not None]
    assert found == within != []
    assert looked_at < MANY / 50


def test_step_of_search_reads_limited_number_of_members(keyspace: Keyspace) -> None:
    search = geo.GeoSearch(point=(20, 10), radius=30_000, unit=1000.0)
    snapshot = keyspace.view(NOW_MS).at(b"at:many")
    area = geo.SearchedRanks.of(snapshot, b"at:many", search)
    parts = list(geo._matches(snapshot, b"at:many", search, area))
    assert sum(map(len, parts)) == MANY
    assert max(map(len, parts)) == geo.CHUNK_MEMBERS


def test_any_ends_as_soon_as_there_are_enough(keyspace: Keyspace) -> None:
    search = geo.GeoSearch(point=(20, 10), radius=30_000, unit=1000.0, count=300, is_any=True)
    snapshot = keyspace.view(NOW_MS).at(b"at:many")
    parts = list(geo._matches(snapshot, b"at:many", search, geo.SearchedRanks.of(snapshot, b"at:many", search)))
    assert [len(part) for part in parts] == [128, 128, 44]


def test_memory_of_search_is_bounded(client: SteppingClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_reply, "WORKING_BYTES_MAX", 10_000)
    line = "GEOSEARCH at:many FROMLONLAT 20 10 BYRADIUS 30000 km"
    assert b"intermediate results exceed 10000 bytes" in ask(client, f"{line} ASC").raw
    assert len(ask(client, f"{line} COUNT 10").plain) == 10
    assert len(ask(client, line).plain) == MANY


def test_many_members_are_requested_in_steps(client: SteppingClient) -> None:
    names = " ".join(member.decode() for member in list(SCORES)[:1000])
    assert len(ask(client, f"GEOPOS at:many {names}").plain) == 1000
    assert len(set(ask(client, f"GEOHASH at:many {names}").plain)) == 1000
