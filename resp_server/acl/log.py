"""ACL LOG: who was denied what, lately."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from resp_server.acl.rules import Reason

# Standard: those of Redis.
GROUPING_MS_MAX = 60_000
GROUPED_ENTRIES_MAX = 10
# Of a key, a channel or a name that is kept (guess).
OBJECT_BYTES_MAX = 1024

REASONS = {Reason.COMMAND: "command", Reason.KEY: "key", Reason.AUTH: "auth", Reason.CHANNEL: "channel"}


@dataclass
class AclLogEntry:
    """One kind of denial, which may have come several times. Texts are of bytes, as latin-1."""

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
        """Tell whether another one is the same again."""
        own, others_ = ((each.reason, each.context, each.object, each.user) for each in (self, other))
        return own == others_ and abs(self.updated_ms - other.updated_ms) <= GROUPING_MS_MAX


class DenialLog:
    """The newest denials, the newest one first."""

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
        """Take in one. of: the command, key or channel; user: who, or as whom somebody tried to log in."""
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
        existing = next((each for each in self.entries[:GROUPED_ENTRIES_MAX] if each.is_same_denial(new)), None)
        if existing is None:
            self._next_id += 1
            self.entries.insert(0, new)
            del self.entries[entries_max:]
            return
        existing.count, existing.client, existing.updated_ms = existing.count + 1, client, now_ms
        self.entries.remove(existing)
        self.entries.insert(0, existing)

    def reset(self) -> None:
        """Forget them."""
        self.entries.clear()

    def to_json(self) -> Sequence[dict[str, Any]]:
        """Return them as another process of the server is told them."""
        return [asdict(each) for each in self.entries]


def merge_entries(entries_of_processes: Sequence[Sequence[dict[str, Any]]]) -> list[AclLogEntry]:
    """Return the entries of several processes, the newest first; ids are of the process that has the entry."""
    entries = [AclLogEntry(**each) for some in entries_of_processes for each in some]
    return sorted(entries, key=lambda each: -each.updated_ms)
