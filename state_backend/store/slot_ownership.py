"""Which slots a store owns, loads and gives up, and how that goes on; nothing of how they are stored.

A slot that is gained is read from the log into the same store while epochs are applied to those that are owned, and is
owned once both are at the same epoch. A slot that is lost is not owned at once; what it held goes in portions, and only
then can it be gained again. So at any instant what is written here, in one transaction with what it is about, says how
to go on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from state_backend.model.key_groups import ALL, NONE, KeyGroups
from state_backend.store.store import Applied


@dataclass(frozen=True)
class Loading:
    """Slots that are being read from the log, and how far that is.

    epoch, term, clock_ms: of the last epoch that they hold as a whole; -1 before the first.
    snapshot: the number of the one that is being read; -1 for none: then it is the next epoch.
    runs: how many runs of that snapshot, or of that epoch, are done.
    """

    slots: KeyGroups
    epoch: int = -1
    term: int = 0
    clock_ms: int = 0
    snapshot: int = -1
    runs: int = 0


@dataclass(frozen=True)
class SlotOwnership:
    """A store's slots.

    leaving: they may hold something still, and are nobody's here. changed_at: the epoch at which `owned` changed last.
    """

    owned: KeyGroups = ALL
    loading: Loading | None = None
    leaving: KeyGroups = NONE
    changed_at: int = -1

    def toward(self, wanted: KeyGroups, epoch: int) -> SlotOwnership:
        """Give up what is not wanted, and begin to load what is missing, if nothing else is being loaded."""
        leaving, loading = self.leaving | (self.owned - wanted), self.loading
        if loading is not None:
            leaving |= loading.slots - wanted
            slots = loading.slots & wanted
            loading = replace(loading, slots=slots) if slots else None
        owned = self.owned & wanted
        if loading is None and (missing := wanted - owned - leaving):
            loading = Loading(missing)
        return SlotOwnership(owned, loading, leaving, self.changed_at if owned == self.owned else epoch)

    def loaded(self, then: Loading, applied: Applied) -> SlotOwnership:
        """Note how far loading is; what has caught up with the store is owned."""
        is_there = then.snapshot < 0 and not then.runs and (then.epoch, then.term) == (applied.epoch, applied.term)
        if is_there:
            return replace(self, owned=self.owned | then.slots, loading=None, changed_at=applied.epoch)
        return replace(self, loading=then)

    def anew(self) -> SlotOwnership:
        """Give up what was loaded so far, so that it is loaded from the beginning."""
        return self if self.loading is None else replace(self, loading=None, leaving=self.leaving | self.loading.slots)

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        loading = self.loading and vars(self.loading) | {"slots": str(self.loading.slots)}
        return {
            "owned": str(self.owned),
            "loading": loading,
            "leaving": str(self.leaving),
            "changed_at": self.changed_at,
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Self:
        """Read a holding back."""
        loading = stored["loading"]
        return cls(
            KeyGroups.parse(stored["owned"]),
            loading and Loading(**(loading | {"slots": KeyGroups.parse(loading["slots"])})),
            KeyGroups.parse(stored["leaving"]),
            stored["changed_at"],
        )
