"""ACL LOG: recent denials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from resp_server.acl.denial import Reason

# Standard: Redis groups equal denials within this time, among the newest entries.
GROUPING_MS_MAX = 60_000
GROUPED_ENTRIES_MAX = 10
# Bytes of a recorded key, channel or name (guess).
OBJECT_BYTES_MAX = 1024

REASONS = {Reason.COMMAND: "command", Reason.KEY: "key", Reason.AUTH: "auth", Reason.CHANNEL: "channel"}


@dataclass
class AclLogEntry:
    """One or more equal denials. Texts are bytes as latin-1."""

    reason: str
    context: str
    object: str
    user: str
    client: str
    entry_id: int
    created_ms: int
    updated_ms: int
    count: int = 1

    def is_same_denial(self, other: AclLogEntry) -> bool:
        """Return whether another entry is to be grouped with this one."""
        own, theirs = ((each.reason, each.context, each.object, each.user) for each in (self, other))
        return own == theirs and abs(self.updated_ms - other.updated_ms) <= GROUPING_MS_MAX


class DenialLog:
    """The latest denials of one process, newest first."""

    def __init__(self) -> None:
        self.entries: list[AclLogEntry] = []
        self._next_id = 0

    def add(
        self,
        reason: Reason,
        *,
        is_queued: bool,
        object_name: bytes,
        user: bytes,
        client: str,
        now_ms: int,
        entries_max: int,
    ) -> None:
        """Record a denial.

        Args:
            object_name: The command, key or channel.
            user: The user, or the name of a failed login.
        """
        new = AclLogEntry(
            REASONS[reason],
            "multi" if is_queued else "toplevel",
            object_name[:OBJECT_BYTES_MAX].decode("latin-1"),
            user[:OBJECT_BYTES_MAX].decode("latin-1"),
            client,
            self._next_id,
            now_ms,
            now_ms,
        )
        existing = next((entry for entry in self.entries[:GROUPED_ENTRIES_MAX] if entry.is_same_denial(new)), None)
        if existing is None:
            self._next_id += 1
            self.entries.insert(0, new)
            del self.entries[entries_max:]
            return
        existing.count, existing.client, existing.updated_ms = existing.count + 1, client, now_ms
        self.entries.remove(existing)
        self.entries.insert(0, existing)

    def reset(self) -> None:
        """Remove all entries."""
        self.entries.clear()

    def to_json(self) -> Sequence[dict[str, Any]]:
        """Return the entries for another process."""
        return [asdict(entry) for entry in self.entries]


def merge_entries(entries_of_processes: Sequence[Sequence[dict[str, Any]]]) -> list[AclLogEntry]:
    """Return the entries of all processes, newest first; an id is unique only within its process."""
    entries = [AclLogEntry(**each) for some in entries_of_processes for each in some]
    return sorted(entries, key=lambda each: -each.updated_ms)
