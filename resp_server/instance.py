"""What commands see of the server they run in, and of the connection that calls them: values, no sockets."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from resp_server.config import ServerConfig
from resp_server.protocol.session import Session
from resp_server.reply_cache import ReplyCache
from resp_server.stats import Stats
from state_backend.clock import Clock, now_ms
from state_backend.keyspace import Keyspace, KeyspaceView
from state_backend.store import Entry, Snapshot

if TYPE_CHECKING:
    from resp_server.commands.table import CommandTable

Found = TypeVar("Found")


@dataclass
class Instance:
    """One server as its commands know it. Lives on the event loop's thread."""

    config: ServerConfig
    keyspace: Keyspace
    table: CommandTable
    clock: Clock = now_ms
    stats: Stats = field(default_factory=Stats)
    sessions: dict[int, Session] = field(default_factory=dict)
    run_id: str = field(default_factory=lambda: secrets.token_hex(20))
    port: int = 0
    # While jobs of the logs are still to be opened: commands about keys are answered with LOADING.
    is_loading: bool = False
    # Bytes waiting to be sent to a session, for CLIENT LIST; the server, which has the sockets, fills it in.
    output_bytes: Callable[[int], int] = lambda session_id: 0

    def __post_init__(self) -> None:
        self.started_ms = self.clock()
        self.get_replies = ReplyCache(self.config.reply_cache_bytes)
        self.view = self.keyspace.view(self.started_ms, self.get_replies.drop)
        self.nothing = Keyspace().view(self.started_ms)

    def renew(self) -> None:
        """Move to the newest epochs: once per input buffer, so that its requests see one epoch and one time."""
        self.view.renew(self.clock())

    def close(self) -> None:
        """Let go of all snapshots."""
        self.view.close()


@dataclass(slots=True)
class Call:
    """Who calls, and where. One per connection."""

    session: Session
    instance: Instance

    @property
    def view(self) -> KeyspaceView:
        """The selected database: all jobs are in database 0."""
        return self.instance.view if self.session.db == 0 else self.instance.nothing

    @property
    def now_ms(self) -> int:
        """The input buffer's clock reading."""
        return self.instance.view.now_ms

    def at(self, key: bytes) -> Snapshot:
        """Return what to ask for a key."""
        return self.view.at(key)

    def entry(self, key: bytes) -> Entry | None:
        """Describe what stands at a key, and count the look-up."""
        return self.counted(self.at(key).entry(key))

    def counted(self, found: Found) -> Found:
        """Count a look-up as a hit, or as a miss if it found nothing (None)."""
        if found is None:
            self.instance.stats.misses += 1
        else:
            self.instance.stats.hits += 1
        return found

    def pin(self) -> KeyspaceView:
        """Open a view of one's own that stays at its jobs and epochs between the steps of a sliced reply.

        The reply closes it.
        """
        jobs = self.instance.keyspace.jobs if self.session.db == 0 else {}
        view = Keyspace(dict(jobs)).view(self.now_ms)
        for _ in view.snapshots():
            pass  # they are opened when they are asked for, and later would be another epoch
        return view
