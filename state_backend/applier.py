"""Applies one job's change log to its store: a process of its own, so that an epoch never delays a reader.

    python -m state_backend.applier --log ROOT --job JOB --store FOLDER

The server that started it writes lines to its standard input: any line means "look now"; its end means "end". It
answers with one JSON object a line on standard output:

    {"event": "open", "path", "generation", "states", "is_incomplete"}  readers open this store from now on
    {"event": "told", "committed", "committed_clock_ms", "applied", "is_stale", "error"}  when one of them changed

Stores lie in `<FOLDER>/<job>/<generation>.<n>`. A store that no longer follows from the log (the log was rewound, or
the store was lost) is built anew in the next folder, and readers answer from the old one until the new one has caught
up; a new generation is taken over in the same way, once its first epoch is there.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import select
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from state_backend.change_log import ChangeLog, Current, Description
from state_backend.clock import now_ms
from state_backend.epochs import Epoch, EpochRef
from state_backend.errors import LogCorruptError, SparkisError
from state_backend.lmdb_store import LmdbStore
from state_backend.store import EpochChanges

logger = logging.getLogger("sparkis.applier")

# A writer shows a sign of life once a second; three missed ones are a writer that stopped (guess).
STALE_AFTER_S = 3.0
PROBE_INTERVAL_S = 1.0
# Bounds the time of one expiry transaction to tens of milliseconds (about 10 us a key).
EXPIRED_KEYS_MAX = 5_000


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
        return not sign.get("is_running") or self._clock() - self._moved_at_s > STALE_AFTER_S


class Applier:
    """Follows one job. `step` does all that can be done now; `report` is told what changed."""

    def __init__(self, log: ChangeLog, job: str, folder: str | Path, report: Callable[[dict[str, Any]], None]) -> None:
        self._log = log.job(job)
        self._folder = Path(folder) / job
        self._report = report
        self._store: LmdbStore | None = None
        self._description: Description | None = None
        self._announced: Path | None = None
        self._pulse = Pulse()
        self._told: dict[str, Any] = {}

    def step(self) -> None:
        """Apply every committed epoch, remove what has expired, and report."""
        error = ""
        try:
            self._follow()
        except SparkisError as failed:
            error = str(failed)
        is_stale = True
        with suppress(SparkisError):
            is_stale = self._pulse.is_stale(self._log.alive())
        if error and error != self._told.get("error"):
            logger.error("job %s: %s", self._log.job, error)
        self._tell(is_stale, error)
        self._tidy()

    def close(self) -> None:
        """Close the store."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def _follow(self) -> None:
        current = self._log.current()
        if current is None:
            return
        if self._store is None or self._store.generation != current.generation:
            self._open(current, is_anew=False)
        while (epoch := self._next(current)) is not None:
            self._apply(current, epoch)
        self._announce(current)

    def _next(self, current: Current) -> Epoch | None:
        """Return the epoch to apply now. A store that does not follow from the log any more is begun anew."""
        assert self._store is not None
        applied = self._store.applied
        if applied.epoch < 0:
            first = self._log.first(current)
            if first is not None and first.previous is not None:
                raise LogCorruptError(
                    f"job {self._log.job!r}: the log begins at epoch {first.epoch}, after {first.previous.epoch}, "
                    f"and holds nothing of what came before; restore the missing epochs from a copy"
                )
            return first
        epoch = self._log.epoch(current, applied.epoch + 1)
        at = EpochRef(applied.epoch, applied.term)
        if current.is_void(at) or current.term < at.term or (epoch is not None and epoch.previous != at):
            logger.warning(
                "job %s: the log no longer leads to epoch %d; the store is built anew",
                self._log.job,
                at.epoch,
            )
            self._open(current, is_anew=True)
            return self._next(current)
        if epoch is None:
            self._log.newest(current)  # raises where epochs are missing
        return epoch

    def _apply(self, current: Current, epoch: Epoch) -> None:
        assert self._store is not None
        if self._description is None or self._description.version < epoch.description:
            self._description = self._log.description(current.generation)
        changes = EpochChanges(
            epoch.epoch,
            epoch.term,
            epoch.clock_ms,
            self._log.runs(current.generation, epoch),
            frozenset(epoch.replaces),
        )
        self._store.apply(changes, self._description.states)

    def _open(self, current: Current, *, is_anew: bool) -> None:
        """Open the newest store of a generation, or the next one."""
        self.close()
        made = sorted(self._serials(current.generation))
        serial = (made[-1] if made else 0) + is_anew
        self._store = LmdbStore(self._folder / f"{current.generation}.{serial}", current.generation)
        self._description = None

    def _serials(self, generation: str) -> list[int]:
        if not self._folder.is_dir():
            return []
        names = [name.rpartition(".") for name in os.listdir(self._folder)]
        return [int(serial) for stem, _, serial in names if stem == generation and serial.isdigit()]

    def _announce(self, current: Current) -> None:
        """Tell readers of a store that has caught up, and throw the others away."""
        assert self._store is not None
        is_new = self._store.path != self._announced
        has_new_states = self._description is not None and self._description.version > self._told.get("version", 0)
        if self._store.applied.epoch < 0 and (self._announced is not None or self._log.first(current) is not None):
            return
        if not (is_new or has_new_states):
            return
        description = self._description or self._log.description(current.generation)
        first = self._log.first(current)
        self._report(
            {
                "event": "open",
                "path": str(self._store.path),
                "generation": current.generation,
                "states": [state.to_json() for state in description.states],
                "is_incomplete": first is not None and first.epoch > 0 and not first.replaces,
            }
        )
        self._announced = self._store.path
        self._told = {"version": description.version}
        self._description = description
        for other in self._folder.iterdir():
            if other != self._announced:
                shutil.rmtree(other, ignore_errors=True)

    def _tell(self, is_stale: bool, error: str) -> None:
        if self._store is None or self._store.path != self._announced:
            told = self._told | {"event": "told", "is_stale": is_stale, "error": error}
            if error and told != self._told:
                self._told = told
                self._report(told)
            return
        applied = self._store.applied
        told = {
            "event": "told",
            "version": self._told.get("version", 0),
            "committed": max(applied.epoch, self._last_number() if error else -1),
            "committed_clock_ms": applied.clock_ms,
            "applied": applied.epoch,
            "is_stale": is_stale,
            "error": error,
        }
        if told != self._told:
            self._told = told
            self._report(told)

    def _last_number(self) -> int:
        """Return the newest epoch number in the log while it cannot be followed; -1 if that is not known either."""
        with suppress(SparkisError):
            current = self._log.current()
            if current is not None:
                return max(self._log.numbers(current.generation), default=-1)
        return -1

    def _tidy(self) -> None:
        """Remove expired keys and the slots of dead readers. An error here shows at the next epoch as well."""
        if self._store is None:
            return
        with suppress(SparkisError):
            self._store.remove_expired(now_ms(), EXPIRED_KEYS_MAX)
            self._store.clear_stale_readers()


def follow_until_end(applier: Applier, lines: int, probe_interval_s: float) -> None:
    """Step at each line of the input, and at least once an interval, until the input ends."""
    while True:
        applier.step()
        ready, _, _ = select.select([lines], [], [], probe_interval_s)
        if ready and not os.read(lines, 65536):
            return


def main(arguments: list[str] | None = None) -> None:
    """Run an applier until its standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m state_backend.applier", description=__doc__)
    parser.add_argument("--log", required=True, help="the log root")
    parser.add_argument("--job", required=True, help="the job to follow")
    parser.add_argument("--store", required=True, help="the folder that holds the stores")
    parser.add_argument("--probe-interval-s", type=float, default=PROBE_INTERVAL_S)
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def report(event: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()

    applier = Applier(ChangeLog(given.log), given.job, given.store, report)
    with suppress(KeyboardInterrupt, BrokenPipeError):
        follow_until_end(applier, sys.stdin.fileno(), given.probe_interval_s)
    applier.close()


if __name__ == "__main__":
    main()
