"""The fresh values of one generation of a job: rows of batches whose epochs are not applied yet.

There are two layers. Batch N + 1 begins in the empty one while the other has the rows of batch N, and a read asks the
layer with the newer batches first. Epoch N clears the layer whose newest batch it is. If N is late, both layers have
rows, and those of N + 2 go to the layer of N + 1: they are right until the last of them is applied.

A query only puts: in update mode no row deletes. A run of the query that opens a batch clears what another run sent.
All processes of a server share the layers, and a file lock orders what they write.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from state_backend.fresh.layer import Layer, LayerSnapshot
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import StoreError, StoreFullError
from state_backend.model.slot_set import ALL, SlotSet
from state_backend.store.uncommitted import FreshFacts

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger("sparkis.server")

# So many replaced runs are refused, the newest ones. The tasks of older runs have ended long before.
REPLACED_RUNS_MAX = 16
# The folders of fresh values in a store's folder begin so.
FOLDER = "fresh."
LOCK = "lock"


def folder_of(store: Path, server: str) -> Path:
    """Return the folder of fresh values in a store's. A server that starts has a new name, and begins without any."""
    return store / f"{FOLDER}{server}"


class FreshValues:
    """The fresh values of a job.

    Notes of a layer: its batches (`first` to `batch`), and when the first row came (`since_ms`). The first layer has in
    addition the run, earlier runs (`replaced`), the slots, and the newest batches that lack rows (`incomplete`) and
    that had no room (`full`).

    Args:
        folder: Is made if it does not exist.
        bytes_max: The size of all values. A batch with more shows none of them.
    """

    def __init__(self, folder: Path, generation: str, bytes_max: int) -> None:
        _make(folder, generation)
        self.folder, self.bytes_max = folder, bytes_max
        self._layers = (Layer(folder / "0", generation), Layer(folder / "1", generation))
        self._lock = open(folder / LOCK, "ab")  # closed with the last reference  # noqa: SIM115

    def snapshots(self, now_ms: int) -> Sequence[LayerSnapshot]:
        """Open a view of each layer."""
        return [layer.snapshot(now_ms) for layer in self._layers]

    def open_batch(self, run: str, applied_epoch: int) -> None:
        """Begin a batch of a run: values of other runs are void.

        StoreError: another run has begun since. Tasks of a run may outlive its driver, and open their batch again.
        """
        with self._locked():
            notes = self._notes()
            self._settle(notes, applied_epoch)
            replaced = notes[0].get("replaced", [])
            if run in replaced:
                raise StoreError(f"run {run} of the query has been replaced by another one; its rows are not shown")
            if (before := notes[0].get("run")) != run:
                replaced = replaced if before is None else [*replaced, before][-REPLACED_RUNS_MAX:]
                self._clear(notes, {"run": run, "replaced": replaced})

    def put(
        self,
        run: str,
        batch: int,
        runs: Sequence[pa.RecordBatch],
        states: Sequence[StateDescriptor],
        applied_epoch: int,
        now_ms: int,
        slots: SlotSet = ALL,
    ) -> None:
        """Write rows of a batch; those of an applied batch, or of an older run, are ignored.

        Args:
            slots: Those of the keys that rows may have.


        StoreFullError: there is no room for the batch, and none of its values is shown.
        """
        with self._locked():
            notes = self._notes()
            if batch <= applied_epoch or notes[0].get("run") != run:
                return
            if batch <= notes[0].get("full", -1):
                raise self._full(batch)
            self._settle(notes, applied_epoch)
            self._follow_slots(notes, slots)
            index = _layer_for(batch, [range(each.get("first", 0), _batch_of(each) + 1) for each in notes])
            before = notes[index]
            notes[index] = before | {
                "first": min(batch, before.get("first", batch)),
                "batch": max(batch, _batch_of(before)),
                "since_ms": before.get("since_ms", now_ms),
            }
            self._layers[index].put(runs, states, notes[index], now_ms)
            if self._is_full():
                self._clear(notes, _without_batch(notes[0]) | {"full": batch, "incomplete": batch})
                error = self._full(batch)
                logger.warning("the store %s: %s", self.folder.parent, error)
                raise error

    def set_incomplete(self, run: str, batch: int) -> None:
        """Note that the writer has dropped rows of a batch."""
        with self._locked():
            notes = self._notes()[0]
            if notes.get("run") == run and notes.get("incomplete", -1) < batch:
                self._layers[0].note({**notes, "incomplete": batch})

    def settle(self, applied_epoch: int) -> None:
        """Drop the values of batches up to an epoch, which is applied."""
        if any(0 <= _batch_of(layer.notes()) <= applied_epoch for layer in self._layers):
            with self._locked():
                self._settle(self._notes(), applied_epoch)

    def clear(self) -> None:
        """Drop all values."""
        with self._locked():
            self._clear(self._notes(), {})

    def facts(self, applied_epoch: int) -> FreshFacts:
        """Return what is known of the values that an epoch has not settled."""
        first = self._layers[0].notes()
        shown = [(layer, notes) for layer, notes in zip(self._layers, self._notes(), strict=True)]
        shown = [(layer, notes) for layer, notes in shown if _batch_of(notes) > applied_epoch]
        return FreshFacts(
            sum((Counter(layer.applied.keys) for layer, _ in shown), Counter()),
            max((notes["batch"] for _, notes in shown), default=None),
            min((notes["since_ms"] for _, notes in shown), default=None),
            first.get("incomplete", -1) > applied_epoch,
        )

    def close(self) -> None:
        """Close the layers; snapshots must be closed before."""
        for layer in self._layers:
            layer.close()
        self._lock.close()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _notes(self) -> list[dict[str, Any]]:
        return [dict(layer.notes()) for layer in self._layers]

    def _follow_slots(self, notes: list[dict[str, Any]], slots: SlotSet) -> None:
        """Drop all values if there are new slots: what is left of them may be older than rows that came elsewhere."""
        before, text = notes[0].get("slots"), str(slots)
        if before == text:
            return
        others = notes[0] | {"slots": text}
        if before is None or not slots - SlotSet.parse(before):
            notes[0] = others
            self._layers[0].note(others)
        else:
            self._clear(notes, _without_batch(others))

    def _settle(self, notes: list[dict[str, Any]], applied_epoch: int) -> None:
        for index, each in enumerate(notes):
            if 0 <= _batch_of(each) <= applied_epoch:
                self._empty(index, notes, _without_batch(each))

    def _clear(self, notes: list[dict[str, Any]], first: Mapping[str, Any]) -> None:
        """Clear both layers, with other notes of the first one."""
        for index in (1, 0):
            self._empty(index, notes, {} if index else first)

    def _empty(self, index: int, notes: list[dict[str, Any]], others: Mapping[str, Any]) -> None:
        if _batch_of(notes[index]) >= 0:
            self._layers[index].clear(others)
        elif notes[index] != others:
            self._layers[index].note(others)
        notes[index] = dict(others)

    def _is_full(self) -> bool:
        """Return whether the values take too many bytes; free pages of the files, which cost less to count, do not."""
        if sum(layer.file_bytes() for layer in self._layers) <= self.bytes_max:
            return False
        return sum(layer.used_bytes()[0] for layer in self._layers) > self.bytes_max

    def _full(self, batch: int) -> StoreFullError:
        return StoreFullError(
            f"the values of batch {batch} that are not committed yet take more than {self.bytes_max} bytes; they are "
            f"shown from its commit on"
        )


# The notes of a layer that end with its values.
OF_BATCH = frozenset(("first", "batch", "since_ms"))


def _without_batch(notes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in notes.items() if name not in OF_BATCH}


def _batch_of(notes: Mapping[str, Any]) -> int:
    return int(notes.get("batch", -1))


def _layer_for(batch: int, layers: Sequence[range]) -> int:
    """Return the layer for the rows of a batch, by the batches of each layer; an empty range: it has no rows.

    It is the layer with that batch; else an empty one; else the newer one for a newer batch, and the older one.
    """
    for index, batches in enumerate(layers):
        if batch in batches:
            return index
    for index, batches in enumerate(layers):
        if not batches:
            return index
    older, newer = sorted(range(2), key=lambda index: layers[index].stop)
    return newer if batch >= layers[newer].stop else older


def _make(folder: Path, generation: str) -> None:
    """Make the folder of two layers, unless another process has; remove those of servers that have ended."""
    if folder.is_dir():
        return
    unfinished = folder.with_name(f"{FOLDER}making.{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    for name in ("0", "1"):
        Layer(unfinished / name, generation).close()
    with suppress(OSError):  # another process was faster
        unfinished.rename(folder)
    shutil.rmtree(unfinished, ignore_errors=True)
    for other in folder.parent.glob(f"{FOLDER}*"):
        if other != folder and not other.name.startswith(f"{FOLDER}making."):
            shutil.rmtree(other, ignore_errors=True)
