"""Changes of the owners of keys, and of states' keys: all that depends on them is brought up to date."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from resp_server.backends.overlay.forwarder_rules import ForwarderRules
from resp_server.backends.overlay.key_conflict_scan import KeyConflictScans
from resp_server.backends.overlay.shadow import Shadow
from resp_server.backends.overlay.upstream_changes import UpstreamChanges
from resp_server.backends.redis.logins import Logins
from resp_server.backends.redis.upstream import Upstream
from resp_server.backends.routing.ownership import Ownership, OwnershipChange
from resp_server.backends.servers.aliased_keys import AliasedKeys
from resp_server.backends.servers.state_clusters import StateClusters
from resp_server.pipeline.context import ServerContext
from resp_server.session.transaction import WatchedVersion

# Takes the place of a watched key's version when the key gets another owner: no digest equals it, so EXEC replies nil.
CHANGED = WatchedVersion("", -1, "owner", covers_value=False)


class OwnerChanges:
    """Learns the key formats of states, and handles new owners of keys."""

    def __init__(
        self,
        server: ServerContext,
        clusters: StateClusters,
        ownership: Ownership,
        upstream: Upstream,
        logins: Logins,
        aliases: AliasedKeys,
        shadow: Shadow,
        upstream_changes: UpstreamChanges,
        forwarder: ForwarderRules,
    ) -> None:
        self._server, self._clusters, self._ownership, self._logins = server, clusters, ownership, logins
        self._aliases, self._shadow, self._upstream_changes, self._forwarder = (
            aliases,
            shadow,
            upstream_changes,
            forwarder,
        )
        self._conflict_scans = KeyConflictScans(ownership, upstream, server.clients.defer)
        # The owners are known from logs, and not all servers have reported their jobs.
        self._is_ahead_of_servers = False
        for cluster in clusters:
            cluster.on_changed = self._states_changed
        clusters.on_key_formats = self._learn
        ownership.on_new = self._conflict_scans.add
        ownership.on_changed = self._owners_changed

    @property
    def is_loading(self) -> bool:
        """Whether some requests with keys get LOADING because servers have not reported their jobs yet."""
        return self._is_ahead_of_servers or not self._ownership.is_known

    def _owners_changed(self, change: OwnershipChange) -> None:
        """Fail the EXEC of clients that watch a key with a new owner, and invalidate all cached keys."""
        self._forwarder.set_key_owners()
        self._shadow.take_rules(self._ownership.rules)
        self._aliases.forget_read()
        self._upstream_changes.follow()
        for session in self._server.sessions.values():
            for database_key in session.watched:
                if change.affects(database_key[1]):
                    session.watched[database_key] = CHANGED
        for dedicated in chain.from_iterable(pool.dedicated for pool in self._logins.pools):
            dedicated.is_dirty |= any(map(change.affects, dedicated.watched))
        self._server.tracking.changed(None)

    def _states_changed(self, keys: Sequence[bytes] | None) -> None:
        """Invalidate keys of states, also by their other names; None: all keys."""
        tracking = self._server.tracking
        tracking.changed(None if keys is None or tracking.is_idle else self._aliases.with_aliases(keys))

    def _learn(self, formats: Mapping[str, Mapping[str, str]]) -> None:
        self._ownership.learn(formats)
        if self._clusters.has_key_formats:
            self._is_ahead_of_servers = False
            self._ownership.complete()
            self._forwarder.set_key_owners()

    def learn_from_logs(self, formats: Sequence[Mapping[str, Mapping[str, str]]]) -> None:
        """Take the key formats of all jobs of each log at a first start: other keys are the upstream's from now on.

        The jobs need not be served yet, or ever. Their keys are states' keys, and wait for a server.
        """
        if self._ownership.is_known:
            return
        self._is_ahead_of_servers = True
        for each in formats:
            self._ownership.learn(each)
        self._ownership.complete()
        self._forwarder.set_key_owners()

    def stop(self) -> None:
        """End the searches for keys of new formats."""
        self._conflict_scans.stop()
