"""Keeps a log short while a server follows it: now and then a process of its own writes a snapshot and sweeps.

    python -m state_backend.compactor --log ROOT --job JOB --store FOLDER

The process reads the applier's store like any reader, so that epochs go on being applied meanwhile.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys

from state_backend import snapshots
from state_backend.change_log import ChangeLog, JobLog
from state_backend.clock import now_ms
from state_backend.epochs import Epoch
from state_backend.errors import SparkisError
from state_backend.lmdb_store import LmdbStore
from state_backend.store import Snapshot

logger = logging.getLogger("sparkis.compactor")

# A snapshot is due when the changes since the last one are twice its size, so that a log holds about three times the
# state at most, but not for little; and after so many epochs, so that a reader has few files to open (guesses).
CHANGES_BYTES_MIN = 16 << 20
CHANGES_PER_STATE = 2
EPOCHS_MAX = 1_000


class Compactor:
    """Counts what an applier applies, and starts the process when a snapshot is due; one at a time."""

    def __init__(self, root: str, job: str, retention_ms: int = snapshots.RETENTION_MS) -> None:
        self._root = root
        self._job = job
        self._retention_ms = retention_ms
        self._bytes = 0
        self._epochs = 0
        self._snapshot_bytes = 0
        self._process: subprocess.Popen[bytes] | None = None

    def count(self, epoch: Epoch) -> None:
        """Take an applied epoch into account."""
        self._epochs += 1
        self._bytes += sum(file.size for file in epoch.files) + sum(map(len, epoch.inline))

    def run_if_due(self, store: LmdbStore) -> None:
        """Start a process for a store's folder, if enough has changed and none is running."""
        if self._process is not None and self._process.poll() is None:
            return
        is_large = self._bytes >= max(CHANGES_BYTES_MIN, CHANGES_PER_STATE * self._snapshot_bytes)
        if not is_large and self._epochs < EPOCHS_MAX:
            return
        self._bytes = self._epochs = 0
        self._snapshot_bytes = store.used_bytes()[0]
        command = [sys.executable, "-m", "state_backend.compactor", "--log", self._root, "--job", self._job]
        command += ["--store", str(store.path), "--retention-ms", str(self._retention_ms)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def compact(log: JobLog, shown: Snapshot, retention_ms: int, at_ms: int) -> str:
    """Write what a store shows as a snapshot, sweep the log, and return one line about it."""
    current = log.current()
    if current is None or current.generation != shown.applied.generation:
        raise SparkisError(f"job {log.job!r}: the store is not of the generation that is written now")
    manifest = snapshots.write(log, current, shown)
    removed = snapshots.sweep(log, current, at_ms, retention_ms)
    size = sum(file.size for file in manifest.files)
    return (
        f"job {log.job}: snapshot of epoch {manifest.epoch}, {manifest.rows} changes in {size} bytes; "
        f"{removed} superseded files removed"
    )


def main(arguments: list[str] | None = None) -> int:
    """Compact one job's log from a store's folder; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m state_backend.compactor", description=__doc__)
    parser.add_argument("--log", required=True, help="the log root")
    parser.add_argument("--job", required=True, help="the job")
    parser.add_argument("--store", required=True, help="the folder of a store that has the job's state")
    parser.add_argument("--retention-ms", type=int, default=snapshots.RETENTION_MS)
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    log = ChangeLog(given.log).job(given.job)
    try:
        current = log.current()
        generation = current.generation if current else ""
        store = LmdbStore(given.store, generation, is_reader=True)
        with store.snapshot(now_ms()) as shown:
            logger.info("%s", compact(log, shown, given.retention_ms, now_ms()))
        store.close()
    except SparkisError as error:
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
