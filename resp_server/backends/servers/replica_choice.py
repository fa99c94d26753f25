"""The choice of a shard's active server: the master, or one of its replicas. Pure.

Only the active server answers for a shard, so that the epochs of its replies do not go back and forth. A replica
becomes active when the master is unreachable, or is behind another server of the shard for too long. The master becomes
active again when it has caught up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from resp_server.backends.servers.min_epochs import has_reached
from resp_server.session.epochs import EMPTY_EPOCHS, Epochs

# How long a server may be behind: longer than servers of a shard usually differ in applying an epoch, and much shorter
# than a request's deadline, so that after a switch the other server can still answer a client that has already seen the
# epoch.
BEHIND_S_MAX = 0.25


class ActiveServerChange(NamedTuple):
    """A change of a shard's active server."""

    master: str
    before: str
    active: str


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
        """Choose and return the active server."""
        usable = {server: epochs[server] for server in self.servers if server in epochs}
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


class ActiveServers:
    """The active server of each shard. A shard without replicas has its master only."""

    def __init__(self) -> None:
        self._shards: dict[str, ReplicaChoice] = {}

    def set_replicas(self, replicas: Mapping[str, Sequence[str]]) -> None:
        """Set the replicas of each master. Servers that are active stay active."""
        self._shards = {
            master: ReplicaChoice(master, some, self.of(master)) for master, some in replicas.items() if some
        }

    def of(self, master: str) -> str:
        """Return the server that answers for a master's shard now."""
        shard = self._shards.get(master)
        return master if shard is None else shard.active

    def of_slots(self, owners: Sequence[str | None]) -> list[str | None]:
        """Return the active server of each slot, by the slots' masters."""
        by_master: dict[str | None, str | None] = {
            master: None if master is None else self.of(master) for master in {None, *owners}
        }
        return list(map(by_master.__getitem__, owners))

    def choose(self, usable: Callable[[str], Epochs | None], now_s: float) -> Sequence[ActiveServerChange]:
        """Choose each shard's active server; return the shards where it has changed.

        Args:
            usable: Returns the epochs of a server; None: the server can take no requests.
        """
        changes = []
        for shard in self._shards.values():
            before, found = shard.active, {server: usable(server) for server in shard.servers}
            epochs = {each: reached for each, reached in found.items() if reached is not None}
            if shard.choose(epochs, now_s) != before:
                changes.append(ActiveServerChange(shard.master, before, shard.active))
        return changes

    def replaceable(self, usable: Callable[[str], Epochs | None]) -> set[str]:
        """Return the active servers that another server can replace."""
        return {
            shard.active
            for shard in self._shards.values()
            if any(server != shard.active and usable(server) is not None for server in shard.servers)
        }


def freshest(epochs: Mapping[str, Epochs]) -> str:
    """Return the server with the newest epochs; if several have them, the first."""
    best, *others = epochs
    for each in others:
        if has_reached(epochs[each], epochs[best]) and not has_reached(epochs[best], epochs[each]):
            best = each
    return best
