"""The slots that a store owns, loads and removes, and the transitions between these states; not how they are stored.

A new slot is loaded from the log into the same store while epochs are applied to the owned slots. It is owned once both
are at the same epoch. A slot that is given up is no longer owned; its keys are removed in batches, and only then can
it be loaded again. The ownership is written in the same transaction as the keys, so a killed process continues from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from state_backend.model.slot_set import ALL, NONE, SlotSet
from state_backend.store.store import AppliedEpoch


@dataclass(frozen=True)
class Loading:
    """Slots that are being loaded from the log, and the progress.

    Args:
        epoch, term, clock_ms: Those of the last epoch that is loaded in full; epoch is -1 before the first.
        snapshot: The epoch of the snapshot that is being loaded; -1 while an epoch is being loaded.
        runs: How many runs of that snapshot or epoch are loaded.
    """

    slots: SlotSet
    epoch: int = -1
    term: int = 0
    clock_ms: int = 0
    snapshot: int = -1
    runs: int = 0


@dataclass(frozen=True)
class SlotOwnership:
    """The slots of a store.

    Args:
        removing: Slots that are not owned, but may still have keys.
        changed_at: The epoch at which `owned` changed last.
    """

    owned: SlotSet = ALL
    loading: Loading | None = None
    removing: SlotSet = NONE
    changed_at: int = -1

    def toward(self, desired: SlotSet, epoch: int) -> SlotOwnership:
        """Return the next ownership on the way to the desired slots.

        Other slots are given up. Missing ones begin to load, unless slots are being loaded already.
        """
        removing, loading = self.removing | (self.owned - desired), self.loading
        if loading is not None:
            removing |= loading.slots - desired
            slots = loading.slots & desired
            loading = replace(loading, slots=slots) if slots else None
        owned = self.owned & desired
        if loading is None and (missing := desired - owned - removing):
            loading = Loading(missing)
        return SlotOwnership(owned, loading, removing, self.changed_at if owned == self.owned else epoch)

    def loaded(self, progress: Loading, applied: AppliedEpoch) -> SlotOwnership:
        """Return the ownership with the progress of loading. Slots that have reached the store's epoch are owned."""
        is_between_epochs = progress.snapshot < 0 and not progress.runs
        if is_between_epochs and (progress.epoch, progress.term) == (applied.epoch, applied.term):
            return replace(self, owned=self.owned | progress.slots, loading=None, changed_at=applied.epoch)
        return replace(self, loading=progress)

    def restart_loading(self) -> SlotOwnership:
        """Return the ownership without the progress of loading: the slots are removed first, and then loaded again."""
        if self.loading is None:
            return self
        return replace(self, loading=None, removing=self.removing | self.loading.slots)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON that `from_json` reads."""
        loading = self.loading and vars(self.loading) | {"slots": str(self.loading.slots)}
        return {
            "owned": str(self.owned),
            "loading": loading,
            "removing": str(self.removing),
            "changed_at": self.changed_at,
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Self:
        """Build an ownership from JSON."""
        loading = stored["loading"]
        return cls(
            SlotSet.parse(stored["owned"]),
            loading and Loading(**(loading | {"slots": SlotSet.parse(loading["slots"])})),
            SlotSet.parse(stored["removing"]),
            stored["changed_at"],
        )
