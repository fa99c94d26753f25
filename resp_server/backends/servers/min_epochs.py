"""The epochs that a server must have reached before a proxy sends it a request. So no client sees epochs go back. Pure.

A server announces the epochs that its replies are from (STATE FOLLOW). When another server takes over a slot, the
epochs that the old server has announced become the minimum epochs of the slot. A server that has not reached them gets
no requests for the slot. In the same way, the epochs that a client has seen are the minimum for the client's requests.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from resp_server.backends.servers.slot_map import ends_of_runs
from resp_server.session.epochs import EMPTY_EPOCHS, REMOVED, Epochs, latest
from state_backend.model.slots import SLOTS


def has_reached(epochs: Epochs, min_epochs: Epochs, removed: Collection[str] = ()) -> bool:
    """Return whether a server at these epochs has reached the minimum epochs; removed jobs do not count."""
    return all(epochs.get(job, REMOVED) >= reached for job, reached in min_epochs.items() if job not in removed)


class MinEpochs:
    """The minimum epochs of each slot. Slots with the same history share one object."""

    def __init__(self) -> None:
        self.by_slot: list[Epochs] = [EMPTY_EPOCHS] * SLOTS
        self._ends: list[int] | None = None

    @property
    def ends(self) -> Sequence[int]:
        """The end of each range of slots that share their minimum epochs: the slot after the range."""
        if self._ends is None:
            self._ends = ends_of_runs(self.by_slot)
        return self._ends

    def raise_to(self, slots: Iterable[int], epochs: Epochs) -> None:
        """Raise the minimum epochs of slots whose server changes.

        Args:
            epochs: Those that the old server has announced.
        """
        self._ends = None
        # (old epochs, new epochs) by the id of the old ones, which the tuple references so that the id stays unique.
        made: dict[int, tuple[Epochs, Epochs]] = {}
        for slot in slots:
            before = self.by_slot[slot]
            if id(before) not in made:
                made[id(before)] = before, latest(before, epochs)
            self.by_slot[slot] = made[id(before)][1]
