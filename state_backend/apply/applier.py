"""Applies one job's change log to its store: a process of its own, so that an epoch never delays a reader.

    python -m state_backend.apply.applier --log ROOT --job JOB --store FOLDER [--slots 0-8191]

The server that started it writes lines to its standard input: `slots 0-8191,9000` says which slots it is to own from
now on; `events on` and `events off`, whether it is to keep what happens to each key (see `key_events`); any other line
means "look now"; its end means "end". It answers with one JSON object a line on standard output:

    {"event": "open", "path", "generation", "states", "renamed_from", "term", "applied", "is_incomplete", "slots", ...}
        readers open this store from now on; that of the job it was renamed from they need no more
    {"event": "told", "committed", "committed_clock_ms", "term", "applied", "is_stale", "error", "is_full", ...}
        when one of them changed; `applied` is the last epoch that readers see, `term` its writer's; `is_full` tells
        that the error is a store without room; `is_incomplete`, `slots` and the like as in the other

    {"event": "damaged"}
        the store that readers have is not what was written: they are to close it, and wait for another one

In the first two, `slots` are owned, `loading` are those wanted that are not owned yet, and `wants` is how many `slots`
lines had been taken by then: so a line's sender knows what was said before the line, and what after.

Stores lie in `<FOLDER>/<job>/<generation>.<n>`. A store that no longer follows from the log (the log was rewound, or
the store was lost) is built anew in the next folder, and readers answer from the old one until the new one has caught
up; a new generation is taken over in the same way, once its first epoch is there. So is a copy without free pages,
when these outweigh the others.

A store is verified when a process opens it first, after it was copied, and when a reader met damage in it. One that is
damaged is thrown away, and readers have none until the next one has caught up.

Slots are gained and lost as `store.slot_ownership` says: one that is lost is not owned at once; one that is gained is
loaded in portions between the epochs (see `slot_backfill`), and owned when it has caught up. While a store is built
anew it is built of the slots that are wanted, and the one that readers have gains none.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from state_backend.apply import snapshots
from state_backend.apply.compactor import Compactor
from state_backend.apply.slot_backfill import is_superseded, portions, snapshot_of
from state_backend.lmdb.store import MAP_BYTES_MAX, LmdbStore
from state_backend.log import promotion
from state_backend.log.change_log import ChangeLog, Current
from state_backend.log.epochs import Epoch, EpochRef
from state_backend.log.sweep import RETENTION_MS
from state_backend.log.terms import Description
from state_backend.model.clock import Clock, now_ms
from state_backend.model.errors import (
    KeyGroupsError,
    LogCorruptError,
    LogUnavailableError,
    SparkisError,
    StoreDamagedError,
    StoreError,
    StoreFullError,
)
from state_backend.model.key_groups import ALL, NONE, KeyGroups
from state_backend.process_memory import give_back
from state_backend.store.slot_ownership import Loading
from state_backend.store.store import Applied, EpochChanges

logger = logging.getLogger("sparkis.applier")

# A writer says how often it shows a sign of life; so many missed ones are a writer that stopped (guess).
BEATS_MISSED = 3
# How long it takes to find that out where signs cost nothing, once a second.
STALE_AFTER_S = 3.0
# While nothing new is found, doubled up to what the log's filesystem says.
PROBE_INTERVAL_S = 1.0
# Bounds the time of one expiry transaction to tens of milliseconds (about 10 us a key).
EXPIRED_KEYS_MAX = 5_000
# Bounds the time of one transaction that removes keys of lost slots (about 10 us a key).
LOST_KEYS_MAX = 5_000
# Bounds the time of one transaction that forgets events (about 10 us a portion).
FORGOTTEN_PORTIONS_MAX = 1_000
# New epochs wait so long for slots that are loaded; a portion that is begun is finished.
LOADING_STEP_S = 0.05
# A line of ranges that are as scattered as they can be has 100 KB.
LINE_BYTES_MAX = 1 << 20
# A listing finds holes of any width in the chain of epochs, but its cost grows with the log: once a minute when quiet.
LISTED_EVERY_LOOKS = 60
# Fewer changes need no memory worth giving back (measured: 0.1 KiB a change).
TRIM_ABOVE_CHANGES = 50_000
# Below this, free pages are soon used again, or not worth a copy (guess).
COMPACT_ABOVE_BYTES = 64 << 20
# While epochs come, free pages are soon as many again after a copy (measured: epochs that rewrite everything keep twice
# as many as the state has, readers that hold eight epochs of 1 % of the keys three times). A copy takes a second for a
# million keys, in which no epoch is applied.
COMPACT_PAUSE_S = 300.0
# A job that has changed nothing for so long is at rest: what writing its epochs takes is given back (guess; jobs with a
# batch every ten seconds are not at rest).
REST_AFTER_S = 30.0
# At rest nobody waits for an epoch meanwhile: free pages of this part of the others, and of no less, are worth a copy.
COMPACT_AT_REST_SHARE = 8
COMPACT_AT_REST_ABOVE_BYTES = 4 << 20
# A store in which readers met damage so often that nobody else finds is not trusted any more.
SUSPICIONS_MAX = 2


NOTHING_HELD: dict[str, int | None] = {"held_epoch": None, "held_since_ms": None}


class Pulse:
    """Watches a writer's counter move, by the watcher's own clock: clocks of other machines may be anywhere."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: tuple[object, object] = (None, None)
        self._moved_at_s = float("-inf")

    def is_stale(self, sign: dict[str, Any]) -> bool:
        """Take the newest sign of life; tell whether the writer has stopped or been silent too long."""
        beat = (sign.get("writer"), sign.get("beat"))
        if beat != self._last and sign:
            first_look = self._last == (None, None)
            self._last = beat
            if not first_look:  # the first one may be as old as the log: wait for it to move
                self._moved_at_s = self._clock()
        if sign.get("is_at_rest"):
            return False
        silent_s_max = BEATS_MISSED * sign.get("every_s", 1.0)
        return not sign.get("is_running") or self._clock() - self._moved_at_s > silent_s_max


class Applier:
    """Follows one job. `step` does all that can be done now; `report` is told what changed."""

    def __init__(
        self,
        log: ChangeLog,
        job: str,
        folder: str | Path,
        report: Callable[[dict[str, Any]], None],
        *,
        map_bytes_max: int = MAP_BYTES_MAX,
        clock: Clock = now_ms,
        compactor: Compactor | None = None,
        slots: KeyGroups = ALL,
    ) -> None:
        self._log = log.job(job)
        self._folder = Path(folder) / job
        self._report = report
        self._map_bytes_max = map_bytes_max
        self._clock = clock
        self._compactor = compactor
        self._wanted = slots
        self._wants = 0  # times that it was told what is wanted
        self._tells_events = False
        self._shown_slots = NONE
        self._portions: Iterator[tuple[EpochChanges, Loading]] = iter(())
        self._loading: Loading | None = None  # what `_portions` goes on from
        self._store: LmdbStore | None = None
        self._verified: Path | None = None  # this store was, or was made by this process
        self._suspicions = 0  # of readers, that were not confirmed
        self._description: Description | None = None
        self._announced: Path | None = None
        self._announced_version = 0
        self._shown = Applied("")
        self._origin = 0  # of the store's epochs (see `epochs`)
        self._is_incomplete = False  # what readers see
        self._held: dict[str, int | None] = NOTHING_HELD
        self._writer = ""
        self._quiet_looks = 0
        self._pulse = Pulse()
        self._sign: dict[str, Any] = {}
        self._sign_due_s = 0.0
        self._told: dict[str, Any] = {}
        self._compact_above_bytes = COMPACT_ABOVE_BYTES
        self._compact_after_s = 0.0
        self._changed = 0  # since memory was given back
        self._rests_from_s = 0.0

    def step(self) -> bool:
        """Apply every committed epoch, load and remove a portion, and report; True if there is more to do at once."""
        error = ""
        is_full = has_more = False
        changed = self._changed
        sign: dict[str, Any] | None = None
        with suppress(SparkisError):
            sign = self._sign_of_life()  # before the log is followed: this notices that it was taken away
        try:
            self._verify_if_suspect()
            self._give_up()
            self._follow()
            has_more = self._load()
        except StoreDamagedError as damage:
            self._throw_away(damage)
            has_more = True
        except (SparkisError, OSError) as failed:
            error, is_full = str(failed), isinstance(failed, StoreFullError)
            if isinstance(failed, StoreError):
                self.close()  # opened again at the next step: an environment may be of no use after an error
        if self._changed != changed:
            self._rests_from_s = time.monotonic() + REST_AFTER_S
        is_stale = sign is None or self._pulse.is_stale(sign)
        if error and error != self._told.get("error"):
            logger.error("job %s: %s", self._log.job, error)
        self._tell(is_stale, error, is_full)
        return self._tidy() or has_more

    def _sign_of_life(self) -> dict[str, Any]:
        """Return the writer's last sign, read again only when there may be another one."""
        if time.monotonic() >= self._sign_due_s or self._sign.get("writer") != self._writer:
            self._sign = self._log.alive()
            self._sign_due_s = time.monotonic() + (self._sign.get("every_s", 1.0) - 1.0) / 2
        return self._sign

    def want(self, slots: KeyGroups) -> None:
        """Own these slots and no others: lost ones from the next step on, gained ones once they are loaded."""
        self._wanted = slots
        self._wants += 1

    def tell_events(self, is_wanted: bool) -> None:
        """Keep what happens to each key from the next step on, or stop to: readers want to notify of it."""
        self._tells_events = is_wanted

    def close(self) -> None:
        """Close the store."""
        if self._store is not None:
            self._store.close()
            self._store = None

    @property
    def told(self) -> dict[str, Any]:
        """What was reported last: another one is news."""
        return self._told

    @property
    def probe_interval_s_max(self) -> float:
        """How rarely to look at the log while there is no news."""
        return self._log.filesystem.probe_interval_s_max

    @property
    def store(self) -> LmdbStore | None:
        """The store that is being written, if one is open."""
        return self._store

    def _give_up(self) -> None:
        """Let go of slots that are not wanted any more, and say so, before anything that may take long."""
        if self._store is not None:
            self._store.hold(self._wanted)
            self._tell_again()

    def _load(self) -> bool:
        """Load portions of what is to be gained, for a moment; True if there may be more."""
        until_s = time.monotonic() + LOADING_STEP_S
        while self._store is not None and (loading := self._store.hold(self._wanted).loading) is not None:
            current = self._log.shown()
            if current is None or current.generation != self._store.generation or self._store.applied.epoch < 0:
                return False
            try:
                self._load_portion(current, loading)
            except LogCorruptError as damage:
                self._loading = None
                applied = self._store.applied.epoch
                if not is_superseded(self._log, current, loading, applied):
                    snapshot = snapshot_of(self._log, current, loading, applied)
                    if snapshot is None:
                        raise
                    self._leave_out(current, snapshot, damage)
                logger.warning(
                    "job %s: what the slots %s are loaded from is not in the log any more, or damaged; they are loaded "
                    "anew",
                    self._log.job,
                    loading.slots,
                )
                self._store.load_anew()
            if time.monotonic() >= until_s:
                return True
        return False

    def _load_portion(self, current: Current, loading: Loading) -> None:
        assert self._store is not None
        if loading != self._loading:
            self._portions = portions(self._log, current, loading, self._store.applied.epoch)
        portion, self._loading = next(self._portions)
        if self._description is None:  # otherwise it is of the store's epoch, or later
            self._description = self._log.description(current.generation)
        self._changed += self._store.load(portion, self._description.known, self._loading)

    def _follow(self) -> None:
        # Who writes is looked up for each epoch: a new writer's epoch against the old writer's term would look foreign.
        while (current := self._log.shown()) is not None:
            if self._store is None or self._store.generation != current.generation:
                self._open(current, is_anew=False)
            epoch = self._next(current)
            if epoch is None:
                self._announce(current)
                self._note_held(current.held_back)
                return
            self._apply(current, epoch)
            self._tell_again()  # not only after the looks for what is next: they may take long
        if self._store is not None and self._log.dropped() is None:  # else the server ends this process in a moment
            raise LogUnavailableError(
                f"job {self._log.job!r} is gone from the log {self._log.filesystem.root}: was it moved, or its storage "
                f"taken away? What was read of it is shown until it is back. To remove it for good: sparkis drop"
            )

    def _note_held(self, held_back: str | None) -> None:
        """Note what is written and not shown yet: it is applied when it is to be shown."""
        if held_back is None:
            self._held = NOTHING_HELD
            return
        if self._held is NOTHING_HELD:
            logger.info("job %s: generation %s is held back until it has caught up", self._log.job, held_back)
        newest = max(self._log.numbers(held_back), default=-1)
        self._held = {"held_epoch": newest, "held_since_ms": promotion.since_ms(self._log, held_back)}

    def _next(self, current: Current) -> Epoch | None:
        """Return the epoch to apply now. A store that does not follow from the log any more is begun anew."""
        assert self._store is not None
        applied = self._store.applied
        at = EpochRef(applied.epoch, applied.term)
        if current.term < at.term:  # a newer writer has come since it was looked up
            current = self._log.shown() or current
            if current.generation != self._store.generation:
                return None
        if applied.epoch >= 0 and (
            current.term < at.term or (current.writer != self._writer and not self._holds(current, applied))
        ):
            logger.warning(
                "job %s: the log no longer leads to epoch %d; the store is built anew", self._log.job, at.epoch
            )
            self._open(current, is_anew=True)
            return self._next(current)
        self._writer = current.writer
        if applied.epoch < 0:
            return self._first(current)
        epoch = self._log.epoch(current, at.epoch + 1) or self._after_a_quiet_look(current, at.epoch + 1)
        # What follows an epoch is never swept before it, and to look at one file is cheaper than to list snapshots.
        is_behind = epoch is None and not self._log.has_file(current.generation, at.epoch)
        if is_behind and self._is_swept(current, at.epoch + 1):
            logger.warning(
                "job %s: epoch %d was swept from the log; starting from a snapshot", self._log.job, at.epoch + 1
            )
            self._open(current, is_anew=True)
            return self._next(current)
        if epoch is not None and epoch.previous != at:
            self._writer = ""  # look again whether the log still holds what was applied
            raise LogCorruptError(
                f"job {self._log.job!r}: epoch {epoch.epoch} follows {epoch.previous}, and not {at}, which was "
                f"applied; the log was changed by hand, or two writers shared it: restore it from a copy"
            )
        return epoch

    def _first(self, current: Current) -> Epoch | None:
        """Begin an empty store: from the newest snapshot, if there is one. Return the first epoch to apply."""
        assert self._store is not None
        manifest = snapshots.newest(self._log, current)
        if manifest is None:
            first = self._log.first(current)
            if first is None or first.previous is None:
                return first
            manifest = snapshots.newest(self._log, current)  # what came before was swept between the two looks
            if manifest is None:
                raise LogCorruptError(
                    f"job {self._log.job!r}: the log begins at epoch {first.epoch}, after {first.previous.epoch}, "
                    f"and holds nothing of what came before; restore the missing epochs from a copy"
                )
        self._description = self._log.description(current.generation)
        changes = snapshots.changes(self._log, current.generation, manifest, self._slots())
        try:
            self._changed += self._store.apply(changes, self._description.known)
        except LogCorruptError as damage:
            self._leave_out(current, manifest.epoch, damage)
            return self._first(current)
        return self._next(current)

    def _leave_out(self, current: Current, number: int, damage: LogCorruptError) -> None:
        """Use no snapshot that is damaged, if the log still leads on from the one before it; else raise the damage."""
        self._log.damaged_snapshots.add(number)
        before = next((each for each in self._log.snapshots(current) if each.epoch < number), None)
        first = self._log.first(current)
        is_begun = first is not None and first.previous is None
        if not is_begun and (before is None or self._log.epoch(current, before.epoch + 1) is None):
            self._log.damaged_snapshots.discard(number)  # it may be restored from a copy
            raise damage
        logger.warning("job %s: the snapshot of epoch %d is left out: %s", self._log.job, number, damage)

    def _holds(self, current: Current, applied: Applied) -> bool:
        """Tell whether the log still has the epoch that was applied last: it may have been removed and begun anew."""
        epoch = self._log.epoch(current, applied.epoch)
        if epoch is None:
            self._log.newest(current)  # raises if it is only missing
            return self._is_swept(current, applied.epoch)
        return (epoch.term, epoch.clock_ms) == (applied.term, applied.clock_ms)

    def _is_swept(self, current: Current, number: int) -> bool:
        """Tell whether an epoch that is not there is covered by a snapshot."""
        manifest = snapshots.newest(self._log, current)
        return manifest is not None and manifest.epoch >= number

    def _after_a_quiet_look(self, current: Current, number: int) -> Epoch | None:
        """Look for epochs beyond a missing one: a listing of them all now and then, the next but one every time."""
        self._quiet_looks += 1
        if self._quiet_looks % LISTED_EVERY_LOOKS == 1:
            self._log.newest(current)  # raises where epochs are missing
        if self._log.epoch(current, number + 1) is None:
            return None
        epoch = self._log.epoch(current, number)  # it may have come between the looks
        if epoch is None:
            self._log.newest(current)
        return epoch

    def _apply(self, current: Current, epoch: Epoch) -> None:
        assert self._store is not None
        if self._description is None or self._description.version < epoch.description:
            self._description = self._log.description(current.generation)
        self._origin = epoch.origin
        changes = EpochChanges(
            epoch.epoch,
            epoch.term,
            epoch.clock_ms,
            self._log.runs(current.generation, epoch, self._slots()),
            frozenset(epoch.replaces),
        )
        # Not only when nothing is left to apply: while epochs come faster than they are applied, the pages that a dead
        # reader holds would never be used again.
        self._store.clear_stale_readers()
        # What a store holds when it is shown for the first time is told to nobody.
        self._store.tells_events = self._tells_events and self._store.path == self._announced
        self._changed += self._store.apply(changes, self._description.known)
        if self._compactor is not None:
            self._compactor.count(epoch)
            self._compactor.write_part_if_due(self._log, current, epoch, self._store)

    def _slots(self) -> KeyGroups | None:
        """Return the slots that epochs are applied to; None for all."""
        assert self._store is not None
        owned = self._store.slot_ownership.owned
        return None if owned == ALL else owned

    def _open(self, current: Current, *, is_anew: bool) -> None:
        """Open the newest store of a generation, or the next one.

        One that holds epochs, with no other beside it, is what readers saw last: it is shown at once, before the log
        is followed, because following may take long or fail.
        """
        self.close()
        self._store = self._open_store(current.generation, is_anew=is_anew)
        self._store.hold(self._wanted)
        self._description = None
        self._writer = ""
        first = self._log.first(current)
        self._origin = first.origin if first is not None else 0
        is_only = [path for path in self._folder.iterdir() if path.is_dir()] == [self._store.path]
        if is_only and self._store.applied.epoch >= 0:
            self._announce(current)

    def _open_store(self, generation: str, *, is_anew: bool) -> LmdbStore:
        """Open a store of a generation: the newest one that is what was written, or an empty one."""
        while True:
            path = self._path(generation, is_anew=is_anew)
            try:
                store = LmdbStore(path, generation, map_bytes_max=self._map_bytes_max)
                try:
                    if path != self._verified and store.applied.epoch >= 0:
                        store.verify()
                except StoreError:
                    store.close()
                    raise
            except StoreDamagedError as damage:
                self._throw_away(damage, path)
                continue
            self._verified, self._suspicions = path, 0
            return store

    def _verify_if_suspect(self) -> None:
        """Raise StoreDamagedError if the store is cut short, or a reader met damage in it."""
        if self._store is None:
            return
        self._store.check_length()
        if self._store.is_suspect:
            self._store.verify()
            self._suspicions += 1
            if self._suspicions >= SUSPICIONS_MAX:
                raise StoreDamagedError("readers meet damage again and again that is not found here")
            self._store.clear_suspicion()

    def _throw_away(self, damage: StoreDamagedError, path: Path | None = None) -> None:
        """Remove a damaged store, and have readers close it; the next one is in another folder."""
        path = path or (self._store.path if self._store is not None else self._announced)
        self.close()
        logger.error("job %s: the store %s is damaged and is built anew from the log: %s", self._log.job, path, damage)
        is_of_readers = self._announced is None or path is None or self._announced.stem == path.stem
        if is_of_readers:  # or may be, from an applier before this one
            self._report({"event": "damaged"})
            self._announced, self._announced_version, self._shown, self._told = None, 0, Applied(""), {}
        if path is not None:
            stem, _, serial = path.name.rpartition(".")
            path.with_name(f"{stem}.{int(serial) + 1}").mkdir(parents=True, exist_ok=True)
            shutil.rmtree(path, ignore_errors=True)

    def throw_all_away(self) -> None:
        """Trust no store that is there: the applier before ended in a way that a damaged one explains."""
        for path in sorted(self._folder.iterdir()) if self._folder.is_dir() else ():
            if path.is_dir():
                self._throw_away(StoreDamagedError("the applier before was ended by a signal"), path)

    def _path(self, generation: str, *, is_anew: bool) -> Path:
        serial = max(self._serials(generation), default=0) + is_anew
        return self._folder / f"{generation}.{serial}"

    def _serials(self, generation: str) -> list[int]:
        if not self._folder.is_dir():
            return []
        names = [name.rpartition(".") for name in os.listdir(self._folder)]
        return [int(serial) for stem, _, serial in names if stem == generation and serial.isdigit()]

    def _announce(self, current: Current) -> None:
        """Tell readers of a store that has caught up, and throw the others away."""
        assert self._store is not None
        is_new = self._store.path != self._announced
        has_new_states = self._description is not None and self._description.version > self._announced_version
        if self._store.applied.epoch < 0 and (self._announced is not None or self._log.first(current) is not None):
            return
        if not (is_new or has_new_states):
            return
        description = self._description or self._log.description(current.generation)
        self._description = description
        self._see_store()
        self._report(
            {
                "event": "open",
                "path": str(self._store.path),
                "generation": current.generation,
                "states": [state.to_json() for state in description.states],
                "renamed_from": description.renamed_from,
                **self._what_is_seen(),
            }
        )
        self._announced = self._store.path
        self._announced_version = description.version
        self._told = {}
        for other in self._folder.iterdir():
            if other != self._announced:
                shutil.rmtree(other, ignore_errors=True)

    def _tell(self, is_stale: bool, error: str, is_full: bool) -> None:
        """Report what readers see; of a store that is being built they see nothing yet."""
        if self._announced is None and not error and not self._told:
            return
        if self._store is not None and self._store.path == self._announced:
            self._see_store()
        told = {
            "event": "told",
            "version": self._announced_version,
            "committed": max(self._shown.epoch, self._last_number() if error else -1),
            "committed_clock_ms": self._shown.clock_ms,
            "is_stale": is_stale,
            "error": error,
            "is_full": is_full,
            **self._what_is_seen(),
        }
        if told != self._told:
            self._told = told
            self._report(told)

    def _see_store(self) -> None:
        """Note what readers see, or are about to see, of the store that is being written."""
        assert self._store is not None
        self._shown = self._store.applied
        self._shown_slots = self._store.slot_ownership.owned
        if self._description is not None:
            # Not known from the beginning: a store may be shown before the log has its first epoch.
            self._is_incomplete = bool(self._description.late) or self._origin > 0

    def _tell_again(self) -> None:
        """Report what readers see now, if it is something else, and the rest as it was."""
        if self._told:
            self._tell(*(self._told[name] for name in ("is_stale", "error", "is_full")))

    def _what_is_seen(self) -> dict[str, Any]:
        slots = self._shown_slots & self._wanted
        return {
            "term": self._shown.term,
            "applied": self._shown.epoch,
            **self._held,
            "is_incomplete": self._is_incomplete,
            "slots": str(slots),
            "loading": str(self._wanted - slots),
            "wants": self._wants,
        }

    def _last_number(self) -> int:
        """Return the newest epoch number in the log while it cannot be followed; -1 if that is not known either."""
        with suppress(SparkisError):
            current = self._log.current()
            if current is not None:
                return max(self._log.numbers(current.generation), default=-1)
        return -1

    def _tidy(self) -> bool:
        """Clear away expired keys, the slots of dead readers, free pages and memory; True if there is more.

        An error here shows at the next epoch as well.
        """
        if self._store is None:
            return False
        has_more = False
        is_at_rest = time.monotonic() >= self._rests_from_s
        try:
            has_more = self._store.remove_left(LOST_KEYS_MAX)
            self._store.tells_events = self._tells_events and self._store.path == self._announced
            has_more |= self._store.expire(self._clock(), EXPIRED_KEYS_MAX) >= EXPIRED_KEYS_MAX
            if not self._tells_events:
                has_more |= not self._store.forget_events(FORGOTTEN_PORTIONS_MAX)
            self._store.clear_stale_readers()
            if self._store.path == self._announced:
                self._compact(is_at_rest)
                if self._compactor is not None and self._slots() is None:
                    self._compactor.run_if_due(self._store)
            if self._changed > TRIM_ABOVE_CHANGES or (self._changed and is_at_rest):
                self._give_back_memory()
        except StoreDamagedError as damage:
            self._throw_away(damage)
            return True
        except (SparkisError, OSError):
            pass
        return has_more

    def _give_back_memory(self) -> None:
        """Let go of the pages that a large epoch was written in; an open environment would keep them for the next."""
        assert self._store is not None
        generation = self._store.generation
        self.close()
        self._store = self._open_store(generation, is_anew=False)
        give_back()
        self._changed = 0

    def _compact(self, is_at_rest: bool) -> None:
        """Move to a copy of the store without free pages, if these outweigh the others. Readers are told to follow.

        At rest fewer of them are enough. Soon after a copy there is another one at rest alone, if they outweigh others.
        """
        assert self._store is not None
        used, free = self._store.used_bytes()
        is_early = time.monotonic() < self._compact_after_s
        is_worth_it = free >= max(used, self._compact_above_bytes) and (is_at_rest or not is_early)
        if is_at_rest and not is_early:
            is_worth_it |= free >= max(used // COMPACT_AT_REST_SHARE, COMPACT_AT_REST_ABOVE_BYTES)
        if not is_worth_it:
            return
        current = self._log.current()
        if current is None or current.generation != self._store.generation:
            return
        self._compact_above_bytes = 2 * free  # the next try, if this one fails
        self._compact_after_s = time.monotonic() + COMPACT_PAUSE_S
        path = self._path(self._store.generation, is_anew=True)
        self._store.copy_to(path)
        self._compact_above_bytes = COMPACT_ABOVE_BYTES
        self.close()
        self._store = self._open_store(current.generation, is_anew=False)
        self._announce(current)
        logger.info("job %s: %d MB of free pages were given back", self._log.job, free >> 20)


def follow_until_end(applier: Applier, lines: int, probe_interval_s: float) -> None:
    """Step at each line of the input, and at least once an interval, until the input ends.

    The interval doubles while nothing is new, up to what the log's filesystem says, and is short again once a look
    finds something. What a line told of does not make it short: who tells of one epoch tells of the next.
    """
    rest = b""
    interval_s, longest_s = probe_interval_s, max(probe_interval_s, applier.probe_interval_s_max)
    is_told = False
    while True:
        before = applier.told
        has_more = applier.step()
        if applier.told != before and not is_told:
            interval_s = probe_interval_s
        ready, _, _ = select.select([lines], [], [], 0 if has_more else interval_s)
        is_told = bool(ready)
        if not ready:
            interval_s = interval_s if has_more else min(2 * interval_s, longest_s)
            continue
        read = os.read(lines, 65536)
        if not read:
            return
        *whole, rest = (rest + read).split(b"\n")
        rest = rest[:LINE_BYTES_MAX]
        for line in whole:
            if line.startswith(b"events"):
                applier.tell_events(line.endswith(b"on"))
            elif line.startswith(b"slots"):
                _want(applier, line[len(b"slots") :].decode("ascii", "replace"))


def _want(applier: Applier, text: str) -> None:
    try:
        applier.want(KeyGroups.parse(text))
    except KeyGroupsError as error:
        logger.error("the slots stay as they are: %s", error)


def _slots(text: str) -> KeyGroups:
    try:
        return KeyGroups.parse(text)
    except KeyGroupsError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main(arguments: list[str] | None = None) -> None:
    """Run an applier until its standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m state_backend.apply.applier", description=__doc__)
    parser.add_argument("--log", required=True, help="the log root")
    parser.add_argument("--job", required=True, help="the job to follow")
    parser.add_argument("--store", required=True, help="the folder that holds the stores")
    parser.add_argument("--slots", type=_slots, default=ALL, help="the slots to own, as 0-5460,9000; all by default")
    parser.add_argument(
        "--compact", action="store_true", help="write snapshots, or parts of them, into the log, and sweep it"
    )
    parser.add_argument("--anew", action="store_true", help="throw away what is in the folder of stores")
    parser.add_argument("--events", action="store_true", help="keep what happens to each key")
    parser.add_argument("--retention-ms", type=int, default=RETENTION_MS, help="what --compact keeps longer")
    parser.add_argument("--probe-interval-s", type=float, default=PROBE_INTERVAL_S)
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def report(event: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()

    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # of a closed terminal: whether to end is the server's to say

    folder = Path(given.store) / given.job
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / "lock", "wb")  # noqa: SIM115  # held to the end of the process
    fcntl.flock(lock, fcntl.LOCK_EX)  # an applier whose server died may still be in its last epoch

    compactor = Compactor(given.log, given.job, given.retention_ms) if given.compact else None
    log = ChangeLog(given.log)
    applier = Applier(log, given.job, given.store, report, compactor=compactor, slots=given.slots)
    applier.tell_events(given.events)
    if given.anew:
        applier.throw_all_away()
    with suppress(KeyboardInterrupt, BrokenPipeError):
        follow_until_end(applier, sys.stdin.fileno(), given.probe_interval_s)
    applier.close()


if __name__ == "__main__":
    main()
