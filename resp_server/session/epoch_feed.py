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

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from resp_server.protocol.replies import Push, Reply, encode

# A job's (term, epoch). They are ordered as in the job's log, also across generations.
JobEpoch = tuple[int, int]

# The newest epoch of each job. Never mutated: newer epochs are another object.
Epochs: TypeAlias = Mapping[str, JobEpoch]
# The distinct `Epochs` that the parts of a reply were read at.
ReplyEpochs: TypeAlias = tuple[Epochs, ...]

# The root and the identity of each job's log.
Logs: TypeAlias = Mapping[str, tuple[str, str]]
NO_LOGS: Logs = {}

REMOVED: JobEpoch = (-1, -1)


def epochs_text(epochs: Iterable[JobEpoch]) -> bytes:
    """Return the terms and epochs as one argument of the protocol between proxies and servers."""
    return ",".join(f"{term}:{epoch}" for term, epoch in epochs).encode()


def epoch_words(epochs: Mapping[str, JobEpoch]) -> list[bytes]:
    """Return the arguments of STATE AT that name jobs' epochs."""
    rows = ((job.encode("utf-8", "surrogateescape"), *each) for job, each in sorted(epochs.items()))
    return [word for job, term, epoch in rows for word in (job, b"%d" % term, b"%d" % epoch)]


def epochs_in(text: bytes) -> list[JobEpoch]:
    """Parse a result of `epochs_text`; ValueError if it is malformed."""
    pairs = [each.split(b":") for each in text.split(b",") if each]
    return [(int(term), int(epoch)) for term, epoch in pairs]


NO_TOPOLOGY = -1
EMPTY_EPOCHS: Epochs = {}
NO_EPOCHS: ReplyEpochs = ()


def latest(first: Epochs, second: Epochs) -> Epochs:
    """Return the later epoch of each job."""
    return {job: max(first.get(job, REMOVED), second.get(job, REMOVED)) for job in first.keys() | second.keys()}


def is_behind(epochs: Epochs, seen: Epochs) -> bool:
    """Return whether one job's epoch is earlier than its seen epoch; a job that is not in `epochs` does not count."""
    return any(epochs.get(job, reached) < reached for job, reached in seen.items())


def indexes_behind(replies: Sequence[ReplyEpochs]) -> list[int]:
    """Return the indexes of the replies that are from an earlier epoch than a reply before them."""
    found = []
    newest: Epochs = EMPTY_EPOCHS
    for number, epochs in enumerate(replies):
        if any(is_behind(epoch, newest) for epoch in epochs):
            found.append(number)
        for epoch in epochs:
            newest = latest(newest, epoch)
    return found


class SeenEpochs:
    """The newest epochs of the replies that a client has received."""

    __slots__ = ("_last", "epochs")

    def __init__(self) -> None:
        self.epochs = EMPTY_EPOCHS
        self._last = NO_EPOCHS

    def add(self, epochs: ReplyEpochs) -> None:
        """Add the epochs of a reply."""
        if epochs is not self._last:  # mostly the same object as before
            self._last = epochs
            for epoch in epochs:
                self.epochs = epoch if self.epochs is EMPTY_EPOCHS else latest(self.epochs, epoch)


# The limit of unsent changed keys, each with an overhead (guess). Beyond it, all keys count as changed.
CHANGED_BYTES_MAX = 1 << 20
KEY_OVERHEAD_BYTES = 64
NEVER_SENT = -1


class Told(NamedTuple):
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

    def pushes_around_reply(self, told: Told) -> bytes:
        """Return the pushes to send before a sliced reply; their changed keys are sent again after that reply."""
        changed = self._changed
        pushes = self.pending_pushes(told)
        if changed is None or changed:
            self.record_changes(changed)
            self.change_counter = NEVER_SENT
        return pushes

    def pending_pushes(self, told: Told) -> bytes:
        """Return pending pushes and mark them sent."""
        pushes: list[Reply] = []
        if self._changed is None or self._changed:
            pushes.append(Push((b"changed", None if self._changed is None else encode(self._changed, 2))))
            self._changed, self._changed_bytes = [], 0
        if told.logs is not self._sent_logs:
            pushes += [
                Push((b"log", job.encode(), root.encode(), identity.encode()))
                for job, (root, identity) in told.logs.items()
                if self._sent_logs.get(job) != (root, identity)
            ]
            self._sent_logs = told.logs
        for job, newest in told.epochs.items():
            if newest is not None and self._sent_epochs.get(job) != newest:
                self._sent_epochs[job] = newest
                pushes.append(Push((b"epoch", job.encode(), *newest)))
        for job in self._sent_epochs.keys() - told.epochs.keys():
            del self._sent_epochs[job]
            pushes.append(Push((b"epoch", job.encode(), *REMOVED)))
        if told.stalled or self._sent_stalled:
            pushes += [
                Push((b"stalled", job.encode(), told.stalled.get(job)))
                for job in told.stalled.keys() | self._sent_stalled.keys()
                if told.stalled.get(job) != self._sent_stalled.get(job)
            ]
            self._sent_stalled = told.stalled
        if told.topology_version != self._sent_version:
            self._sent_version = told.topology_version
            pushes.append(Push((b"topology", told.topology_version)))
        return b"".join([encode(push, 3) for push in pushes])


def union_of(epochs: ReplyEpochs, more: ReplyEpochs) -> ReplyEpochs:
    """Return the epochs of two replies, each once."""
    if epochs is more or not more:
        return epochs
    return epochs + tuple(each for each in more if not any(each is other for other in epochs)) if epochs else more
