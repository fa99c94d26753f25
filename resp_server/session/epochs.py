"""The epochs that replies were read at: their order, their text between proxies and servers, and those seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

# A job's (term, epoch). They are ordered as in the job's log, also across generations.
JobEpoch = tuple[int, int]

# The newest epoch of each job. Never mutated: newer epochs are another object.
Epochs: TypeAlias = Mapping[str, JobEpoch]
# The distinct `Epochs` that the parts of a reply were read at.
ReplyEpochs: TypeAlias = tuple[Epochs, ...]

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


EMPTY_EPOCHS: Epochs = {}
NO_EPOCHS: ReplyEpochs = ()


def latest(first: Epochs, second: Epochs) -> Epochs:
    """Return the later epoch of each job."""
    return {job: max(first.get(job, REMOVED), second.get(job, REMOVED)) for job in first.keys() | second.keys()}


def union_of(epochs: ReplyEpochs, more: ReplyEpochs) -> ReplyEpochs:
    """Return the epochs of two replies, each once."""
    if epochs is more or not more:
        return epochs
    return epochs + tuple(each for each in more if not any(each is other for other in epochs)) if epochs else more


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
