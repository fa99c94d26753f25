"""The epochs of all servers of a cluster: those that each has announced, the newest ones, and the removed jobs."""

from __future__ import annotations

from collections.abc import Set

from resp_server.backends.servers.announced_epochs import AnnouncedEpochs
from resp_server.backends.servers.outages import CommonEpoch, Outages
from resp_server.backends.servers.requests import ConnectionKey
from resp_server.session.epochs import EMPTY_EPOCHS, REMOVED, Epochs, JobEpoch, ReplyEpochs, latest

# A job that no server announces for this long counts as removed. Then no request waits for its epochs (guess).
REMOVED_AFTER_S = 5.0


class ClusterEpochs:
    """The epochs of a cluster's servers. Runs on the event loop's thread.

    Attributes:
        of_connections: The epochs that servers have announced over each connection.
        newest_announced: The newest epochs that each server ever announced, by its address.
        newest_shared: The epochs of a reply from `newest`, the same object for all servers.
        is_aligned: All ready servers are at `newest`, so the epochs of no client rule out a server.
        removed_jobs: The jobs that all servers have dropped.
        outages: The jobs that no server can read from the log.
    """

    def __init__(self) -> None:
        self.of_connections: dict[ConnectionKey, AnnouncedEpochs] = {}
        self.newest_announced: dict[str, dict[str, JobEpoch]] = {}
        self.newest: Epochs = EMPTY_EPOCHS
        self.is_aligned = True
        self.removed_jobs: set[str] = set()
        self.outages = Outages()
        self.newest_shared: ReplyEpochs = (self.newest,)
        self._unreported_since_s: dict[str, float] = {}

    def newest_announced_by(self, address: str) -> Epochs:
        """Return the newest epochs that a server ever announced."""
        return self.newest_announced.get(address, EMPTY_EPOCHS)

    def newest_at(self, address: str) -> Epochs:
        """Return the newest epochs of the jobs that a server has."""
        announced = self.newest_announced_by(address)
        return {job: reached for job, reached in self.newest.items() if job in announced}

    def client_min_epochs(self, seen: Epochs) -> Epochs:
        """Return the epochs that a client has seen, of this cluster's jobs."""
        return seen if seen is self.newest else {job: seen[job] for job in seen.keys() & self.newest.keys()}

    def check_alignment(self) -> None:
        """Update `is_aligned`: whether all ready servers have reached the newest epochs."""
        newest = self.newest_shared
        self.is_aligned = all(each.reply_epochs is newest for each in self.of_connections.values() if each.is_ready)

    def count(self, announced: AnnouncedEpochs) -> None:
        """Set the epochs of a connection as they count now."""
        counted = self.outages.counted
        announced.set_counted(
            self._shared({job: counted(job, reached) for job, reached in announced.announced.items()})
        )

    def _shared(self, epochs: Epochs) -> ReplyEpochs:
        """Return an object with these epochs, the same one for all servers that have reached the newest epochs."""
        newest = latest(self.newest, epochs)
        if newest != self.newest:
            self.newest, self.newest_shared = newest, (newest,)
        return self.newest_shared if epochs == self.newest else (epochs,)

    def record(self, address: str, job: str, reached: JobEpoch) -> None:
        """Record a server's epoch of a job, or `REMOVED`."""
        self.check_alignment()
        seen = self.newest_announced.setdefault(address, {})
        if reached == REMOVED:
            seen.pop(job, None)
        elif reached > seen.get(job, REMOVED):
            seen[job] = reached
        self.removed_jobs.discard(job)
        self._unreported_since_s.pop(job, None)

    def set_common(self, common: dict[str, CommonEpoch]) -> None:
        """Set the epochs at which jobs are read whose log no server can read."""
        self.outages.common = common
        for connection in self.of_connections.values():
            self.count(connection)
        self.check_alignment()

    def find_removed_jobs(self, now_s: float, reported: set[str]) -> list[str]:
        """Return, once, the jobs that no server has announced for a while: they were removed or renamed."""
        found = []
        for job in {job for seen in self.newest_announced.values() for job in seen} - reported - self.removed_jobs:
            if now_s - self._unreported_since_s.setdefault(job, now_s) > REMOVED_AFTER_S and reported:
                self._remove(job)
                found.append(job)
        return found

    def _remove(self, job: str) -> None:
        self.removed_jobs.add(job)
        for seen in self.newest_announced.values():
            seen.pop(job, None)
        self.newest = {name: reached for name, reached in self.newest.items() if name != job}
        self.newest_shared = (self.newest,)
        for connection in self.of_connections.values():
            connection.set_counted(self._shared(connection.counted))
        self.check_alignment()

    # -- for the stores of a server on this machine -------------------------------------------------------------------

    def is_ready(self, server: ConnectionKey) -> bool:
        """Return whether a server can take requests.

        Args:
            server: The connection over which the server announces its epochs.
        """
        found = self.of_connections.get(server)
        return found is not None and found.is_ready

    def announced(self, server: ConnectionKey, job: str) -> JobEpoch | None:
        """Return the newest epoch of a job that a server is known to have; None: it does not serve the job."""
        found, seen = self.of_connections.get(server), self.newest_announced_by(server.address)
        if found is None or job not in found.counted or job not in seen:
            return None
        return max(found.counted[job], seen[job])

    def jobs_of(self, server: ConnectionKey) -> Set[str]:
        """Return the jobs that a server has announced."""
        found = self.of_connections.get(server)
        return frozenset() if found is None else found.counted.keys()

    def raise_to(self, server: ConnectionKey, job: str, reached: JobEpoch) -> None:
        """Note that clients may see an epoch of a server's store before the server announces it."""
        self.newest_announced[server.address][job] = reached
        self._shared({job: reached})
        self.check_alignment()
