"""A proxy reads a state server's stores at epochs that are not behind those that the server has announced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from resp_server.backends.servers.announced_epochs import AnnouncedEpochs
from resp_server.backends.servers.cluster_epochs import ClusterEpochs
from resp_server.backends.servers.requests import ConnectionKey
from resp_server.backends.servers.server_stores import ServerStores
from resp_server.session.epochs import JobEpoch
from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import StoreError
from state_backend.model.records import Change, Op
from tests.builders import apply_epoch

LOADED = {"event": "loaded", "run_id": "run"}
NOW_MS = 1_000
SERVER = ConnectionKey("here:1", 2, False)
STATES = [StateDescriptor("speed", key="car", value="kmh")]

MakeStore = Callable[[str, int], dict[str, object]]


def announce(epochs: ClusterEpochs, job: str, reached: JobEpoch) -> None:
    """Announce an epoch, as the state server does."""
    connection = epochs.of_connections[SERVER]
    connection.set_epoch(job, reached)
    epochs.count(connection)
    epochs.record(SERVER.address, job, reached)


@pytest.fixture
def make_store(tmp_path: Path) -> MakeStore:
    """Return a function that writes a store of a job up to an epoch, and returns the line that reports it."""

    def make(job: str, epoch: int) -> dict[str, object]:
        path = tmp_path / job / str(epoch)
        store = LmdbStore(path, "g", map_bytes_max=1 << 26)
        change = Change("speed", Op.PUT, b"%b:speed:1" % job.encode(), value=b"%d" % epoch)
        apply_epoch(store, STATES, [change], epoch, clock_ms=NOW_MS)
        store.close()
        states = [each.to_json() for each in STATES]
        of = {"path": str(path), "generation": "g", "states": states, "is_incomplete": False, "renamed_from": None}
        return {"event": "open", "job": job, "of": of}

    return make


@pytest.fixture
def epochs() -> ClusterEpochs:
    found = ClusterEpochs()
    found.of_connections[SERVER] = connection = AnnouncedEpochs()
    connection.is_ready = True
    return found


@pytest.fixture
def stores(epochs: ClusterEpochs) -> ServerStores:
    found = ServerStores(lambda: NOW_MS)
    found.follow(epochs)
    found.set_address(SERVER.address)
    return found


def value(stores: ServerStores, job: str = "job") -> object:
    view = stores.current_view()
    assert view is not None
    return view.snapshot_of(job).value(b"%b:speed:1" % job.encode())


def test_nothing_is_read_before_all_jobs_are_loaded_or_without_connection(
    stores: ServerStores, epochs: ClusterEpochs, make_store: MakeStore
) -> None:
    announce(epochs, "job", (1, 5))
    stores.take(make_store("job", 5))
    assert stores.current_view() is None
    stores.take(LOADED)
    assert value(stores) == b"5"
    epochs.of_connections[SERVER].is_ready = False
    assert stores.current_view() is None


def test_store_behind_announced_epoch_is_unread(
    stores: ServerStores, epochs: ClusterEpochs, make_store: MakeStore
) -> None:
    stores.take(LOADED)
    announce(epochs, "job", (1, 5))
    stores.take(make_store("job", 5))
    assert value(stores) == b"5"
    announce(epochs, "job", (2, 0))  # the state server serves a new generation
    stores.epoch_announced()
    with pytest.raises(StoreError):
        value(stores)
    stores.take(make_store("job", 7))
    with pytest.raises(StoreError):
        value(stores)


def test_watch_point_has_state_servers_store_name(
    stores: ServerStores, epochs: ClusterEpochs, make_store: MakeStore
) -> None:
    announce(epochs, "job", (1, 5))
    for line in (make_store("job", 5), LOADED):
        stores.take(line)
    assert stores.current_view() is not None
    assert stores.watch_point("job") == ("run/5", 5)


def test_unannounced_job_is_not_read(stores: ServerStores, epochs: ClusterEpochs, make_store: MakeStore) -> None:
    stores.take(LOADED)
    for job in ("job", "other"):
        stores.take(make_store(job, 5))
    announce(epochs, "other", (1, 5))
    with pytest.raises(StoreError):
        value(stores)
    assert value(stores, "other") == b"5"


def test_unannounced_epoch_is_noted(stores: ServerStores, epochs: ClusterEpochs, make_store: MakeStore) -> None:
    stores.take(LOADED)
    announce(epochs, "job", (1, 5))
    stores.take(make_store("job", 6))
    assert value(stores) == b"6"
    assert epochs.newest == {"job": (1, 6)}


def test_forgotten_store_and_those_of_server_that_ended_are_closed(
    stores: ServerStores, epochs: ClusterEpochs, make_store: MakeStore
) -> None:
    for job in ("job", "other"):
        announce(epochs, job, (1, 5))
    lines = make_store("job", 5), make_store("other", 5)
    for line in (*lines, LOADED):
        stores.take(line)
    assert (value(stores), value(stores, "other")) == (b"5", b"5")
    stores.take({"event": "forget", "job": "job"})
    view = stores.current_view()
    assert view is not None and view.job_names() == ["other"]
    stores.reset()
    assert stores.current_view() is None
    for line in (*lines, LOADED):  # LMDB opens a folder once in a process: the former ones were closed
        stores.take(line)
    assert (value(stores), value(stores, "other")) == (b"5", b"5")


def test_store_that_cannot_be_opened_is_left_to_state_server(
    stores: ServerStores, epochs: ClusterEpochs, make_store: MakeStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    announce(epochs, "job", (1, 5))
    stores.take(make_store("job", 5))
    stores.take(LOADED)
    line = make_store("job", 6)
    (tmp_path / "job" / "6" / "data.mdb").unlink()
    stores.take(line)
    assert "job job: the state server answers all of its reads: the store " in caplog.text
    view = stores.current_view()
    assert view is not None and view.job_names() == []


def test_unread_store_prevents_listing(stores: ServerStores, epochs: ClusterEpochs, make_store: MakeStore) -> None:
    announce(epochs, "job", (1, 5))
    for line in (make_store("job", 5), LOADED):
        stores.take(line)
    view = stores.current_view()
    assert view is not None and view.key_count() == 1
    announce(epochs, "another", (1, 0))
    with pytest.raises(StoreError, match="by its state server"):
        view.key_count()
    stores.take(make_store("another", 0))
    assert view.key_count() == 2
