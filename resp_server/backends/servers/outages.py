"""The epoch that all servers of a job can answer from while none of them can read its log. Pure.

The servers of a job may have stopped at different epochs. Then no server gets a newer one, so a client that has seen
the newest epoch would wait for the other servers in vain. The proxy agrees with all servers on the newest epoch that
all of them still have: those that are further go back to it (STATE HOLD). It counts as the newest epoch that clients
have seen, so that all minimum epochs are reached. A job's epoch goes back only here, once, and the job is stale
meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from resp_server.session.epochs import JobEpoch


class CommonEpoch(NamedTuple):
    """The epoch that all servers have, and the newest epoch that clients have seen, as which it counts."""

    held: JobEpoch
    counts_as: JobEpoch


@dataclass
class Outages:
    """The jobs that no server can read from the log, and the epoch at which each of them is read."""

    common: dict[str, CommonEpoch] = field(default_factory=dict)

    def counted(self, job: str, reached: JobEpoch) -> JobEpoch:
        """Return the epoch as which a server's epoch counts."""
        common = self.common.get(job)
        return common.counts_as if common is not None and reached == common.held else reached

    def readable(self, job: str, counted: JobEpoch) -> JobEpoch:
        """Return the epoch to request from servers for one that counts."""
        common = self.common.get(job)
        return common.held if common is not None and counted == common.counts_as else counted


def newest_common(epochs_of_servers: Sequence[Collection[JobEpoch]]) -> JobEpoch | None:
    """Return the newest epoch that all servers have; None if there is none, or no server."""
    if not epochs_of_servers:
        return None
    return max(set(epochs_of_servers[0]).intersection(*epochs_of_servers[1:]), default=None)
