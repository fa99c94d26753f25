"""The choice of a shard's active server: the master, or one of its replicas. Pure.

Only the active server answers for a shard, so that the epochs of its replies do not go back and forth. A replica
becomes active when the master is unreachable, or is behind another server of the shard for too long. The master becomes
active again when it has caught up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from resp_server.backends.servers.min_epochs import has_reached
from resp_server.session.epoch_feed import EMPTY_EPOCHS, Epochs

# Longer than servers of a shard usually differ in applying an epoch. Much shorter than a request's deadline, so that
# after a switch the other server can still answer a client that has already seen the epoch.
BEHIND_S_MAX = 0.25


class ReplicaChoice:
    """A master, its replicas that can answer, and the active one of these servers."""

    def __init__(self, master: str, replicas: Sequence[str], active: str | None = None) -> None:
        self.master = master
        self.servers = (master, *replicas)
        self.active = active if active in self.servers else master
        # The epochs of another server that the active server had not reached at `_since_s`.
        self._awaited: Epochs = EMPTY_EPOCHS
        self._since_s = 0.0

    def choose(self, epochs: Mapping[str, Epochs], now_s: float) -> str:
        """Choose and return the active server.

        Args:
            epochs: The epochs of each server that can answer.
        """
        usable = {each: epochs[each] for each in self.servers if each in epochs}
        is_usable = self.active in usable
        if (is_usable and self._is_behind_for_long(usable, now_s)) or (not is_usable and usable):
            self._switch(freshest(usable))
        elif not is_usable or (self.master in usable and has_reached(usable[self.master], usable[self.active])):
            self._switch(self.master)
        return self.active

    def _switch(self, server: str) -> None:
        if server != self.active:
            self.active = server
            self._awaited = EMPTY_EPOCHS

    def _is_behind_for_long(self, usable: Mapping[str, Epochs], now_s: float) -> bool:
        own = usable[self.active]
        if has_reached(own, self._awaited):
            ahead = freshest(usable)
            self._awaited, self._since_s = (EMPTY_EPOCHS if has_reached(own, usable[ahead]) else usable[ahead]), now_s
        return not has_reached(own, self._awaited) and now_s - self._since_s > BEHIND_S_MAX


def freshest(epochs: Mapping[str, Epochs]) -> str:
    """Return the server with the newest epochs; if several have them, the first."""
    best, *others = epochs
    for each in others:
        if has_reached(epochs[each], epochs[best]) and not has_reached(epochs[best], epochs[each]):
            best = each
    return best
