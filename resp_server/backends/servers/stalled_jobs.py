"""Jobs whose log no server can read: all servers answer from the newest epoch that all of them have (`outages`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from resp_server.backends.servers.cluster_epochs import ClusterEpochs
from resp_server.backends.servers.outages import CommonEpoch, newest_common
from resp_server.backends.servers.requests import ConnectionKey
from resp_server.backends.servers.server_connection import ServerConnection
from resp_server.session.epochs import REMOVED, JobEpoch

logger = logging.getLogger("sparkis.proxy")


class StalledJobs:
    """Agrees with the servers of a cluster on the epochs of such jobs.

    Args:
        owners: Returns the connections to the active servers of all shards.
    """

    def __init__(
        self,
        name: str,
        epochs: ClusterEpochs,
        connections: Mapping[ConnectionKey, ServerConnection],
        owners: Callable[[], Iterable[ServerConnection | None]],
        changed: Callable[[], None],
    ) -> None:
        self._name, self._epochs, self._connections = name, epochs, connections
        self._owners, self._changed = owners, changed

    def agree(self) -> None:
        """Read each job whose log no server can read at the newest epoch that all servers have."""
        common: dict[str, CommonEpoch] = {}
        for job in {job for each in self._connections.values() for job in each.announced.stalled}:
            held = newest_common(self._epochs_of_owners(job))
            if held is not None:
                common[job] = CommonEpoch(held, max(held, self._epochs.newest.get(job, REMOVED)))
        before = self._epochs.outages.common
        if common != before:
            for job in common.keys() | before.keys():
                self._log(job, before.get(job), common.get(job))
            self._epochs.set_common(common)
            for connection in list(self._connections.values()):
                if connection.is_connected:
                    connection.send_queued()
            self._changed()
        self._hold(common)

    def _epochs_of_owners(self, job: str) -> list[list[JobEpoch]]:
        """Return the epochs that each reachable owner of slots has; none if one of them can read the log."""
        found: list[list[JobEpoch]] = []
        for connection in self._owners():
            if connection is None or not connection.is_connected:
                continue
            if job not in connection.announced.stalled:
                return []
            found.append(connection.announced.stalled[job])
        return found

    def _hold(self, common: Mapping[str, CommonEpoch]) -> None:
        """Have each server that is further than the others answer from the epoch that all have."""
        for connection in self._connections.values():
            epochs = connection.announced
            for job in epochs.stalled.keys() | epochs.held.keys():
                found = common.get(job)
                if found is None:
                    connection.hold(job, None)
                elif epochs.announced.get(job) != found.held and found.held in epochs.stalled.get(job, ()):
                    connection.hold(job, found.held)

    def _log(self, job: str, before: CommonEpoch | None, common: CommonEpoch | None) -> None:
        if common is None:
            logger.info("%s: job %s is read at the newest epochs again", self._name, job)
        elif before is None or before.held != common.held:
            logger.warning(
                "%s: no server can read the log of job %s; it is read at epoch %d of term %d, which all servers have",
                self._name,
                job,
                common.held[1],
                common.held[0],
            )
