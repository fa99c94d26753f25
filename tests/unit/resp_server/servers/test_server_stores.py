"""A proxy reads a state server's stores at epochs that are not behind those that the server has announced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from resp_server.backends.servers.server_connection import ConnectionKey
from resp_server.backends.servers.server_stores import ServerStores
from resp_server.session.epoch_feed import JobEpoch
from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import StoreError
from state_backend.model.records import Change, Op, runs_of
from state_backend.store.store import EpochChanges

NOW_MS = 1_000
SERVER = ConnectionKey("here:1", 2, False)
STATES = [StateDescriptor("speed", key="car", value="kmh")]

MakeStore = Callable[[str, int], dict[str, object]]


class Epochs:
    """Stands for what a proxy knows of its state server."""

    def __init__(self) -> None:
        self.is_connected = True
        self.newest: dict[str, JobEpoch] = {}

    def is_ready(self, server: ConnectionKey) -> bool:
        assert server == SERVER
        return self.is_connected

    def announced(self, server: ConnectionKey, job: str) -> JobEpoch | None:
        return self.newest.get(job)

    def raise_to(self, server: ConnectionKey, job: str, reached: JobEpoch) -> None:
        self.newest[job] = reached


@pytest.fixture
def make_store(tmp_path: Path) -> MakeStore:
    """Return a function that writes a store of a job up to an epoch, and returns the line that reports it."""

    def make(job: str, epoch: int) -> dict[str, object]:
        path = tmp_path / job / str(epoch)
        store = LmdbStore(path, "g", map_bytes_max=1 << 26)
        change = Change("speed", Op.PUT, b"%b:speed:1" % job.encode(), value=b"%d" % epoch)
        store.apply(EpochChanges(epoch, 1, NOW_MS, list(runs_of([change], ["speed"]))), STATES)
        store.close()
        states = [each.to_json() for each in STATES]
        of = {"path": str(path), "generation": "g", "states": states, "is_incomplete": False, "renamed_from": None}
        return {"event": "open", "job": job, "of": of}

    return make


@pytest.fixture
def epochs() -> Epochs:
    return Epochs()


@pytest.fixture
def stores(epochs: Epochs) -> ServerStores:
    found = ServerStores(lambda: NOW_MS)
    found.follow(epochs)
    found.set_address(SERVER.address)
    return found


def value(stores: ServerStores, job: str = "job") -> object:
    view = stores.current_view()
    assert view is not None
    return view.snapshot_of(job).value(b"%b:speed:1" % job.encode())


def test_nothing_is_read_before_all_jobs_are_loaded_or_without_a_connection(
    stores: ServerStores, epochs: Epochs, make_store: MakeStore
) -> None:
    epochs.newest["job"] = (1, 5)
    stores.take(make_store("job", 5))
    assert stores.current_view() is None
    stores.take({"event": "loaded"})
    assert value(stores) == b"5"
    epochs.is_connected = False
    assert stores.current_view() is None


def test_a_store_that_is_behind_the_announced_epoch_is_not_read(
    stores: ServerStores, epochs: Epochs, make_store: MakeStore
) -> None:
    stores.take({"event": "loaded"})
    epochs.newest["job"] = (1, 5)
    stores.take(make_store("job", 5))
    assert value(stores) == b"5"
    epochs.newest["job"] = (2, 0)  # the state server serves a new generation
    stores.epoch_announced()
    with pytest.raises(StoreError):
        value(stores)
    stores.take(make_store("job", 7))
    with pytest.raises(StoreError):
        value(stores)


def test_a_job_that_the_server_does_not_announce_is_not_read(
    stores: ServerStores, epochs: Epochs, make_store: MakeStore
) -> None:
    stores.take({"event": "loaded"})
    for job in ("job", "other"):
        stores.take(make_store(job, 5))
    epochs.newest["other"] = (1, 5)
    with pytest.raises(StoreError):
        value(stores)
    assert value(stores, "other") == b"5"


def test_an_epoch_that_is_not_announced_yet_is_noted(
    stores: ServerStores, epochs: Epochs, make_store: MakeStore
) -> None:
    stores.take({"event": "loaded"})
    epochs.newest["job"] = (1, 5)
    stores.take(make_store("job", 6))
    assert value(stores) == b"6"
    assert epochs.newest == {"job": (1, 6)}


def test_a_forgotten_store_and_those_of_a_server_that_ended_are_closed(
    stores: ServerStores, epochs: Epochs, make_store: MakeStore
) -> None:
    epochs.newest = {"job": (1, 5), "other": (1, 5)}
    lines = make_store("job", 5), make_store("other", 5)
    for line in (*lines, {"event": "loaded"}):
        stores.take(line)
    assert (value(stores), value(stores, "other")) == (b"5", b"5")
    stores.take({"event": "forget", "job": "job"})
    view = stores.current_view()
    assert view is not None and view.job_names() == ["other"]
    stores.reset()
    assert stores.current_view() is None
    for line in (*lines, {"event": "loaded"}):  # LMDB opens a folder once in a process: the former ones were closed
        stores.take(line)
    assert (value(stores), value(stores, "other")) == (b"5", b"5")


def test_a_store_that_cannot_be_opened_is_left_to_the_state_server(
    stores: ServerStores, epochs: Epochs, make_store: MakeStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    epochs.newest["job"] = (1, 5)
    stores.take(make_store("job", 5))
    stores.take({"event": "loaded"})
    line = make_store("job", 6)
    (tmp_path / "job" / "6" / "data.mdb").unlink()
    stores.take(line)
    assert "job job: the state server answers all of its reads: the store " in caplog.text
    view = stores.current_view()
    assert view is not None and view.job_names() == []
