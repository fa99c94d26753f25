"""What a connection that follows a server (STATE FOLLOW) was told of epochs and of the topology, and what is new.

    >4 epoch <job> <term> <epoch>      readable from now on; -1 and -1 for a job that is not shown any more
    >2 topology <version>
    >2 changed <an array of keys, as one text, or nil>     only with STATE FOLLOW KEYS: what they held holds no more

Push frames, in either version of the protocol: they are told apart from replies by their first byte. What is told is
exact: no reply before a push is from a later epoch, and no request after it is answered from an earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from resp_server.protocol.replies import Push, Reply, encode

# A job's term and epoch. Their order is that of the job's log, over its generations too.
Reached = tuple[int, int]

# What was reached in each job. Never changed: what is newer is another one.
Epochs: TypeAlias = Mapping[str, Reached]
# What the parts of a reply are from, each once.
ReplyEpochs: TypeAlias = tuple[Epochs, ...]

GONE: Reached = (-1, -1)
NO_TOPOLOGY = -1
NOTHING: Epochs = {}
NO_EPOCHS: ReplyEpochs = ()


def latest(first: Epochs, second: Epochs) -> Epochs:
    """Return what was reached in each job by either."""
    return {job: max(first.get(job, GONE), second.get(job, GONE)) for job in first.keys() | second.keys()}


class Seen:
    """The newest epochs that a client was answered from. What is told is most often what was told last."""

    __slots__ = ("_last", "epochs")

    def __init__(self) -> None:
        self.epochs = NOTHING
        self._last = NO_EPOCHS

    def add(self, told: ReplyEpochs) -> None:
        """Take in what an answer is from."""
        if told is not self._last:
            self._last = told
            for each in told:
                self.epochs = each if self.epochs is NOTHING else latest(self.epochs, each)


# What may wait to be told of changed keys, each with what it costs beside its bytes (guess). Beyond, any may have
# changed.
CHANGED_BYTES_MAX = 1 << 20
KEY_OVERHEAD_BYTES = 64
MOVED = -1


class EpochFeed:
    """What one connection was told. `moves` is for its owner: up to which of its server's moves that was."""

    def __init__(self) -> None:
        self.change_counter = MOVED
        self._reached: dict[str, Reached] = {}
        self._version = NO_TOPOLOGY
        self._changed: list[bytes] | None = []
        self._changed_bytes = 0

    def record_changes(self, keys: Sequence[bytes] | None) -> None:
        """Take in which keys changed, to be told; None: any."""
        if keys is not None:
            self._changed_bytes += sum(map(len, keys)) + len(keys) * KEY_OVERHEAD_BYTES
        if keys is None or self._changed is None or self._changed_bytes > CHANGED_BYTES_MAX:
            self._changed = None
        else:
            self._changed += keys

    def pending_pushes_around(self, jobs: Mapping[str, Reached | None], version: int) -> bytes:
        """Return the same as `news`; which keys changed is told once more, behind the reply that begins now."""
        changed = self._changed
        told = self.pending_pushes(jobs, version)
        if changed is None or changed:
            self.record_changes(changed)
            self.change_counter = MOVED
        return told

    def pending_pushes(self, jobs: Mapping[str, Reached | None], version: int) -> bytes:
        """Return the pushes about what is not told yet; it is with that. None: a job of which nothing was shown yet."""
        told: list[Reply] = []
        if self._changed is None or self._changed:
            told.append(Push((b"changed", None if self._changed is None else encode(self._changed, 2))))
            self._changed, self._changed_bytes = [], 0
        for job, reached in jobs.items():
            if reached is not None and self._reached.get(job) != reached:
                self._reached[job] = reached
                told.append(Push((b"epoch", job.encode(), *reached)))
        for job in self._reached.keys() - jobs.keys():
            del self._reached[job]
            told.append(Push((b"epoch", job.encode(), *GONE)))
        if version != self._version:
            self._version = version
            told.append(Push((b"topology", version)))
        return b"".join([encode(each, 3) for each in told])
