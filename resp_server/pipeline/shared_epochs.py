"""The epochs that a proxy reads at this server because other owners of slots have them, too."""

from __future__ import annotations

from collections.abc import Callable

from resp_server.pipeline.held_jobs import HeldJobs
from resp_server.protocol.errors import NoEpochError
from resp_server.session.epochs import epochs_text
from state_backend.model.clock import Clock
from state_backend.store.keyspace import Keyspace, KeyspaceView
from state_backend.store.pinned_epochs import PinnedEpochs


class SharedEpochs:
    """The pinned epochs, the jobs that are held at one, and the epochs that a request at a proxy waits for.

    Attributes:
        on_awaited: Called with a job, an epoch and its term, for which a request at a proxy waits (see STATE NOTICE).
    """

    def __init__(self, keyspace: Keyspace, clock: Clock, view: Callable[[], KeyspaceView]) -> None:
        self.pinned = PinnedEpochs(keyspace)
        self.held = HeldJobs(keyspace, self.pinned, clock, view)
        self.on_awaited: Callable[[str, int, int], None] = lambda job, epoch, term: None

    def keep(self, now_ms: int, *, is_needed: bool) -> None:
        """Pin epochs while a proxy may need one that other owners of slots have, too; else release unused ones."""
        if is_needed:
            self.pinned.keep(now_ms)
        else:
            self.pinned.release_unused(now_ms)

    def no_epoch(self) -> NoEpochError:
        """Return the error for an epoch that is not pinned; it names those that are."""
        pinned = sorted(self.pinned.epochs().items())
        return NoEpochError(" ".join(f"{job} {epochs_text(epochs).decode()}" for job, epochs in pinned))

    def close(self) -> None:
        """Release all epochs."""
        self.pinned.close()
