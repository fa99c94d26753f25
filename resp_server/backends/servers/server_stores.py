"""The stores of a state server on the same machine, which its proxy reads as well, so most reads are not forwarded.

The state server reports which stores it serves (`job_catalog.ReportedCatalog`). Both processes see an epoch as soon as
it is committed, and the state server moves to the newest epochs before it answers input. So a forwarded request is
never answered from an earlier epoch than a read before it in this process. The other way round, and when the state
server has changed to another store or has started again, the epochs that it announces decide: a store that is behind
them, or whose job is not announced, is not read here.

A read here may be from an epoch whose changed keys the state server has not reported yet. So this process, too, finds
the changed keys of an epoch before any read from it: clients that track keys get their invalidations before the reply.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from resp_server.backends.servers.cluster_epochs import ClusterEpochs
from resp_server.backends.servers.requests import ConnectionKey
from resp_server.pipeline.watch import watch_point_of
from resp_server.serving.job_catalog import LocalJobCatalog
from resp_server.session.session import RESP2
from state_backend.model.clock import Clock, now_ms
from state_backend.model.errors import SparkisError, StoreError
from state_backend.store.keyspace import Keyspace, KeyspaceView
from state_backend.store.store import Snapshot
from state_backend.store.uncommitted import OnChange

logger = logging.getLogger("sparkis.proxy")


class StoresView(KeyspaceView):
    """A view of the stores at epochs that are not behind those of their state server."""

    def __init__(self, keyspace: Keyspace, now_ms: int, on_change: OnChange) -> None:
        super().__init__(keyspace, now_ms, on_change)
        self.epochs: ClusterEpochs | None = None
        self.server = ConnectionKey("", RESP2, False)
        # The version of each job's snapshot that was last compared with the announced epoch.
        self._compared: dict[str, int] = {}

    def snapshot_of(self, name: str) -> Snapshot:
        """Return the current snapshot of a job; StoreError if the state server has another store, or a later epoch."""
        snapshot = super().snapshot_of(name)
        if self._compared.get(name) != snapshot.version:
            self._compare(name, snapshot)
            self._compared[name] = snapshot.version
        return snapshot

    def check_all_listed(self) -> None:
        """Raise StoreError also if the state server serves a job whose store is not read here."""
        super().check_all_listed()
        if self.epochs is not None and not self.epochs.jobs_of(self.server) <= self._keyspace.jobs.keys():
            raise StoreError("a job's keys can only be listed by its state server")

    def compare_again(self) -> None:
        """Compare all snapshots before their next use: an epoch was announced, or a store has changed."""
        self._compared.clear()

    def _compare(self, name: str, snapshot: Snapshot) -> None:
        reached = snapshot.applied.term, snapshot.applied.epoch
        announced = None if self.epochs is None else self.epochs.announced(self.server, name)
        if announced is None or reached < announced:
            raise StoreError(f"job '{name}' is at another epoch at its state server")
        if self.epochs is not None and reached > announced:
            self.epochs.raise_to(self.server, name, reached)

    def release_old_epochs(self) -> None:
        """Move the open snapshots to the newest epochs."""
        for name in list(self._snapshots):
            with suppress(StoreError):
                super().snapshot_of(name)


class ServerStores:
    """The stores that the state server reports, and a view of them. Runs on the event loop's thread.

    Attributes:
        on_changed: Called with keys that have changed; None: any key may have changed.
    """

    def __init__(self, clock: Clock = now_ms) -> None:
        self.on_changed: OnChange = lambda keys: None
        self._clock = clock
        self._is_loaded, self._run_id = False, ""
        self._keyspace = Keyspace()
        self._catalog = LocalJobCatalog(self._keyspace)
        self._view = StoresView(self._keyspace, clock(), lambda keys: self.on_changed(keys))

    def follow(self, epochs: ClusterEpochs) -> None:
        """Use the epochs that the state server announces."""
        self._view.epochs = epochs

    def set_address(self, address: str) -> None:
        """Set the address of the state server."""
        self._view.server = ConnectionKey(address, RESP2, False)

    def take(self, line: Mapping[str, Any]) -> None:
        """Handle a line of the state server."""
        match line["event"]:
            case "loaded":
                self._is_loaded, self._run_id = True, line["run_id"]
            case "open":
                self._open(line["job"], line["of"])
            case "forget":
                self._catalog.remove(line["job"])
        self._renew()

    def reset(self) -> None:
        """Close all stores: the state server has ended."""
        self._is_loaded = False
        for job in list(self._keyspace.jobs):
            self._catalog.remove(job)
        self._renew()

    def current_view(self) -> StoresView | None:
        """Return the view, at the newest epochs; None while the state server has to answer all requests."""
        view = self._view
        if not self._is_loaded or view.epochs is None or not view.epochs.is_ready(view.server):
            return None
        view.renew(self._clock())
        return view

    def watch_point(self, job: str) -> tuple[str, int]:
        """Return the lineage of a job's store, by the state server's name for it, and the epoch in the view."""
        return watch_point_of(self._run_id, self._view, job)

    def epoch_announced(self) -> None:
        """Compare the stores with an epoch that the state server has announced."""
        self._view.compare_again()

    def release_old_epochs(self) -> None:
        """Move to the newest epochs, also if no client reads: LMDB does not reuse the pages of older ones."""
        self._renew()
        self._view.release_old_epochs()

    def _open(self, job: str, event: Mapping[str, Any]) -> None:
        try:
            self._catalog.serve(self._catalog.prepare(job, event))
        except SparkisError as error:
            self._catalog.remove(job)
            logger.warning("job %s: the state server answers all of its reads: %s", job, error)

    def _renew(self) -> None:
        self._view.compare_again()
        self._view.renew(self._clock())
