"""STATE FOLLOW: the epochs and topology that were sent to a following connection, and the pushes about newer ones.

    >4 epoch <job> <term> <epoch>      readable from now on; -1 and -1 for a removed job; 0 and -1: not readable yet
    >3 stalled <job> <epochs>          its log cannot be read here, and it can be read at these epochs, as "1:7,1:8"
    >3 stalled <job> nil               its log can be read again
    >2 topology <version>
    >4 log <job> <root> <id>           the log of a readable job; peers of older versions ignore it
    >2 changed <an array of keys, as one text, or nil>     only with STATE FOLLOW KEYS: their values changed

Push frames are used in both versions of the protocol; their first byte differs from that of replies. A reply before an
epoch's push is from this epoch or an earlier one. A reply to a request after the push is from this epoch or a later
one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from resp_server.protocol.replies import Push, Reply, encode
from resp_server.session.epochs import REMOVED, JobEpoch

# The root and the identity of each job's log.
Logs: TypeAlias = Mapping[str, tuple[str, str]]
NO_LOGS: Logs = {}

NO_TOPOLOGY = -1
# The limit of unsent changed keys, each with an overhead (guess). Beyond it, all keys count as changed.
CHANGED_BYTES_MAX = 1 << 20
KEY_OVERHEAD_BYTES = 64
NEVER_SENT = -1


class SentFacts(NamedTuple):
    """The epochs and changes that a server sends to one follower.

    Args:
        epochs: The newest of each job; None: the job has no epoch yet.
        stalled: The epochs at which each job can be read whose log cannot be read (`epochs_text`).
    """

    epochs: Mapping[str, JobEpoch | None]
    topology_version: int
    logs: Logs
    stalled: Mapping[str, bytes]


class EpochFeed:
    """One connection's sent epochs and pending pushes. change_counter: the server's counter at the last push."""

    def __init__(self) -> None:
        self.change_counter = NEVER_SENT
        self._sent_epochs: dict[str, JobEpoch] = {}
        self._sent_stalled: Mapping[str, bytes] = {}
        self._sent_version = NO_TOPOLOGY
        self._sent_logs: Logs = NO_LOGS
        self._changed: list[bytes] | None = []
        self._changed_bytes = 0

    def record_changes(self, keys: Sequence[bytes] | None) -> None:
        """Record changed keys; None: any key may have changed."""
        if keys is not None:
            self._changed_bytes += sum(map(len, keys)) + len(keys) * KEY_OVERHEAD_BYTES
        if keys is None or self._changed is None or self._changed_bytes > CHANGED_BYTES_MAX:
            self._changed = None
        else:
            self._changed += keys

    def pushes_around_reply(self, facts: SentFacts) -> bytes:
        """Return the pushes to send before a sliced reply; their changed keys are sent again after that reply."""
        changed = self._changed
        pushes = self.pending_pushes(facts)
        if changed is None or changed:
            self.record_changes(changed)
            self.change_counter = NEVER_SENT
        return pushes

    def pending_pushes(self, facts: SentFacts) -> bytes:
        """Return pending pushes and mark them sent."""
        pushes: list[Reply] = []
        if self._changed is None or self._changed:
            pushes.append(Push((b"changed", None if self._changed is None else encode(self._changed, 2))))
            self._changed, self._changed_bytes = [], 0
        if facts.logs is not self._sent_logs:
            pushes += [
                Push((b"log", job.encode(), root.encode(), identity.encode()))
                for job, (root, identity) in facts.logs.items()
                if self._sent_logs.get(job) != (root, identity)
            ]
            self._sent_logs = facts.logs
        for job, newest in facts.epochs.items():
            if newest is not None and self._sent_epochs.get(job) != newest:
                self._sent_epochs[job] = newest
                pushes.append(Push((b"epoch", job.encode(), *newest)))
        for job in self._sent_epochs.keys() - facts.epochs.keys():
            del self._sent_epochs[job]
            pushes.append(Push((b"epoch", job.encode(), *REMOVED)))
        if facts.stalled or self._sent_stalled:
            pushes += [
                Push((b"stalled", job.encode(), facts.stalled.get(job)))
                for job in facts.stalled.keys() | self._sent_stalled.keys()
                if facts.stalled.get(job) != self._sent_stalled.get(job)
            ]
            self._sent_stalled = facts.stalled
        if facts.topology_version != self._sent_version:
            self._sent_version = facts.topology_version
            pushes.append(Push((b"topology", facts.topology_version)))
        return b"".join([encode(push, 3) for push in pushes])
