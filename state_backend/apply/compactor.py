"""Keeps a log short while servers read it: a separate process writes a snapshot when enough has changed, and sweeps.

    python -m state_backend.apply.compactor --log ROOT --job JOB [--store FOLDER]

The process reads the applier's store, and the applier continues meanwhile.

A store of all slots is written at any epoch, once there are enough changes after the newest snapshot in the log, from
any server. Stores of some slots must all be written at the same epoch, and their servers do not communicate:
each server derives the epoch from the log. An epoch is *marked* when the bytes of changes since the beginning of the
log pass a multiple of one interval, or when the epoch's number is a multiple of another interval. `LEAD_EPOCHS` later
all servers write their slots.

The intervals are computed from the newest snapshot. They only double, so servers that read different snapshots still
have some marks in common. Without a new snapshot the intervals grow with the changes, so servers that are busy at each
other's marks get a common mark in the end. If a server misses a mark (it was down, or is still writing), the snapshot
lacks a part and is not complete; the servers try again at the next mark. Servers of a version with another rule would
miss all marks, so the rule is as binding as the log's format.

For a store of some slots the process starts at the mark. When the epoch is applied, the applier writes the store's
folder to the process's standard input (JSON, one line). The process writes one line when it has opened a snapshot of
the store, and the applier continues. A line such as `log json debug` sets the log's format and levels at any time.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import queue
import select
import subprocess
import sys
import threading
from contextlib import suppress

from state_backend import log_lines
from state_backend.apply import snapshots
from state_backend.lmdb.store import LmdbStore
from state_backend.log.change_log import ChangeLog, CurrentGeneration, JobLog
from state_backend.log.epochs import Epoch
from state_backend.log.garbage_collector import RETENTION_MS, sweep
from state_backend.model.clock import now_ms
from state_backend.model.errors import SparkisError
from state_backend.model.slot_set import ALL, NONE
from state_backend.store.store import Snapshot

logger = logging.getLogger("sparkis.compactor")

# A snapshot is written when the changes since the last one are `CHANGES_PER_STATE` times its size, and at least
# `CHANGES_BYTES_MIN`: so a log has at most about six times the size of the state, two snapshots and the changes
# of two intervals, or the changes of the retention time (see `garbage_collector`). A snapshot is also written after
# `EPOCHS_MAX` epochs, so that a reader opens few files (guesses).
CHANGES_BYTES_MIN = 16 << 20
CHANGES_PER_STATE = 2
EPOCHS_MAX = 1_000
# Without a new snapshot an interval is at least the changes, or epochs, since the last one, divided by this. So the
# number of parts that are written in vain is bounded.
CHANGES_PER_INTERVAL = 2
# The process takes half a second to start; epochs that come faster wait for it (guess).
LEAD_EPOCHS = 8
# How long an applier waits until the process has opened the store.
OPEN_TIMEOUT_S = 5.0
# No epoch and no reader waits for a snapshot, and Spark's tasks may need the same cores. A million keys take one core
# two seconds (measured).
NICENESS = 10
# How long the process waits for the store's folder.
IDLE_S_MAX = 60.0


def is_marked(epoch: Epoch, interval_bytes: int, interval_epochs: int) -> bool:
    """Return whether an epoch passes a multiple of either interval."""
    before_bytes = max(0, epoch.log_bytes - epoch.change_bytes)  # older versions write no `log_bytes`
    if epoch.log_bytes // interval_bytes > before_bytes // interval_bytes:
        return True
    return epoch.epoch > 0 and epoch.epoch % interval_epochs == 0


def intervals_after(base: Epoch, epoch: Epoch) -> tuple[int, int]:
    """Return the two intervals between marks: bytes of changes, and epochs.

    Args:
        base: The newest snapshot, or the first epoch if there is no snapshot.
    """
    since_bytes = (epoch.log_bytes - base.log_bytes) // CHANGES_PER_INTERVAL
    since_epochs = (epoch.epoch - base.epoch) // CHANGES_PER_INTERVAL
    interval_bytes = _doubled(CHANGES_BYTES_MIN, max(CHANGES_PER_STATE * base.change_bytes, since_bytes))
    return interval_bytes, _doubled(EPOCHS_MAX, since_epochs)


def _doubled(interval: int, least: int) -> int:
    while interval < least:
        interval *= 2
    return interval


class Compactor:
    """Compares applied epochs with the log's newest snapshot, and starts the process when enough has changed."""

    def __init__(self, root: str, job: str, retention_ms: int = RETENTION_MS) -> None:
        self._root = root
        self._job = job
        self._retention_ms = retention_ms
        self._applied: Epoch | None = None
        # The newest known snapshot, or the first epoch. Then, the epoch at which the process was last started.
        self._base: Epoch | None = None
        self._started: Epoch | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: subprocess.Popen[bytes] | None = None  # the last process whose end `take_end` has returned
        self._part_epoch: int | None = None  # the epoch at which a part is to be written

    def note_applied(self, epoch: Epoch) -> None:
        """Record an applied epoch."""
        if self._applied is not None and epoch.previous != self._applied.ref:  # of another generation
            self._base = self._started = None
        self._applied = epoch

    @property
    def is_running(self) -> bool:
        """Whether the process is running."""
        return self._process is not None and self._process.poll() is None

    @property
    def is_busy(self) -> bool:
        """Whether the process is running, or has ended and `take_end` has not returned that yet."""
        return self._process is not self._ended

    def take_end(self) -> bool:
        """Return whether the process has ended since the last call."""
        if self.is_running or not self.is_busy:
            return False
        self._ended = self._process
        return True

    def set_up_log(self, inherited: str) -> None:
        """Have the process log as a value of `log_lines.CHILD_VARIABLE` says, if one is running."""
        if self._process is not None and self._process.stdin is not None and self.is_running:
            with suppress(OSError):  # it has just ended
                self._process.stdin.write(b"log %b\n" % inherited.encode())

    def close(self) -> None:
        """Kill the process, if one is running: it must not outlive the server. Its snapshot stays incomplete."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def run_if_due(self, log: JobLog, store: LmdbStore) -> None:
        """Start a process for a store of all slots, if enough has changed and no process is running."""
        epoch = self._applied
        if epoch is None or self.is_running:
            return
        if self._base is None or self._is_due(self._base, epoch):
            current = log.visible()
            if current is None or current.generation != store.generation:
                return
            self._base = snapshots.newest(log, current) or log.first(current)
        if self._base is None or not self._is_due(self._base, epoch):
            return
        self._started = epoch
        self._start([*self._command(), "--store", str(store.path)], subprocess.DEVNULL)

    def _is_due(self, base: Epoch, epoch: Epoch) -> bool:
        """Return whether there are enough changes since a base, and since the last start, which may have failed."""
        since = self._started if self._started is not None and self._started.epoch > base.epoch else base
        is_large = epoch.log_bytes - since.log_bytes >= max(CHANGES_BYTES_MIN, CHANGES_PER_STATE * base.change_bytes)
        return is_large or epoch.epoch - since.epoch >= EPOCHS_MAX

    def _command(self) -> list[str]:
        command = [sys.executable, "-m", "state_backend.apply.compactor", "--log", self._root, "--job", self._job]
        return [*command, "--retention-ms", str(self._retention_ms)]

    def write_part_if_due(self, log: JobLog, current: CurrentGeneration, epoch: Epoch, store: LmdbStore) -> None:
        """Write a part of a snapshot, if the store owns some slots and the applied epoch is `LEAD_EPOCHS` after a mark.

        Returns once the process has opened a snapshot of the store. Failures are logged: the next mark is another try.
        """
        try:
            if self._part_epoch is None:
                if self._is_mark(log, current, epoch, store):
                    self._part_epoch = epoch.epoch + LEAD_EPOCHS
                    self._start_process()
            elif epoch.epoch >= self._part_epoch:
                if epoch.epoch == self._part_epoch:
                    self._let_open(store)
                self._part_epoch = None
        except (SparkisError, OSError) as error:
            self._part_epoch = None
            logger.warning("job %s: no part of a snapshot is written at epoch %d: %s", self._job, epoch.epoch, error)

    def _is_mark(self, log: JobLog, current: CurrentGeneration, epoch: Epoch, store: LmdbStore) -> bool:
        if not is_marked(epoch, CHANGES_BYTES_MIN, EPOCHS_MAX):  # larger intervals mark no other epochs
            return False
        if store.slot_ownership.owned in (ALL, NONE) or self.is_running:
            return False
        base = snapshots.newest(log, current) or log.first(current) or epoch
        return base.epoch < epoch.epoch and is_marked(epoch, *intervals_after(base, epoch))

    def _start_process(self) -> None:
        self._start(self._command(), subprocess.PIPE)

    def _start(self, command: list[str], output: int) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=output)

    def _let_open(self, store: LmdbStore) -> None:
        """Let the process open its snapshot of the store, and wait until it has."""
        if not self.is_running:  # the process waited too long for the epoch, and ended
            self._start_process()
        process = self._process
        assert process is not None
        if process.stdin is None or process.stdout is None:
            return  # the process was started when the store owned all slots, and takes no folder
        with process.stdout:
            request = {"store": str(store.path), "generation": store.generation}
            process.stdin.write(json.dumps(request).encode() + b"\n")
            ready, _, _ = select.select([process.stdout], [], [], OPEN_TIMEOUT_S)
            if not ready or not process.stdout.read(1):
                process.kill()
                raise SparkisError(f"the compactor process did not open the store within {OPEN_TIMEOUT_S:g} s")


def compact(log: JobLog, snapshot: Snapshot, retention_ms: int, at_ms: int) -> str:
    """Write a store as a snapshot, or as a part of one; sweep if the snapshot is complete. Return a line about it."""
    current = log.visible()
    if current is None or current.generation != snapshot.applied.generation:
        raise SparkisError(f"job {log.job!r}: the store is not of the visible generation")
    manifest = snapshots.write(log, current, snapshot)
    if manifest is None:
        return f"job {log.job}: the snapshot of epoch {snapshot.applied.epoch} still lacks parts"
    removed = sweep(log, current, at_ms, retention_ms)
    return (
        f"job {log.job}: snapshot of epoch {manifest.epoch}, {manifest.rows} changes in {manifest.change_bytes} bytes; "
        f"{removed} superseded files removed"
    )


def main(arguments: list[str] | None = None) -> int:
    """Compact one job's log from a store's folder; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m state_backend.apply.compactor", description=__doc__)
    parser.add_argument("--log", required=True, help="the log root")
    parser.add_argument("--job", required=True, help="the job")
    parser.add_argument("--store", help="the folder of a store of all slots (default: read from standard input)")
    parser.add_argument("--retention-ms", type=int, default=RETENTION_MS)
    options = parser.parse_args(arguments)
    log_lines.set_up_child()
    requests = _Requests()
    log = ChangeLog(options.log).job(options.job)
    try:
        if options.store is not None:
            current = log.visible()
            store = LmdbStore(options.store, current.generation if current else "", is_reader=True)
            snapshot = store.snapshot(now_ms())
        elif (request := requests.next()) is not None:
            store = LmdbStore(request["store"], request["generation"], is_reader=True)
            snapshot = store.snapshot(now_ms())
            print(flush=True)
        else:
            return 0
        os.nice(NICENESS)
        with snapshot:
            logger.info("%s", compact(log, snapshot, options.retention_ms, now_ms()))
        store.close()
    except SparkisError as error:
        logger.error("%s", error)
        return 1
    return 0


class _Requests:
    """The lines on standard input, read by a thread to its end: of the log's levels, and of a store."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[dict[str, str] | None] = queue.SimpleQueue()
        # The thread's own descriptor: it may read longer than `sys.stdin` is open, whose number another file gets then.
        threading.Thread(target=self._read, args=(os.dup(sys.stdin.fileno()),), daemon=True).start()

    def next(self) -> dict[str, str] | None:
        """Return a store's folder and generation; None at the end of the input, or after IDLE_S_MAX."""
        with suppress(queue.Empty):
            return self._queue.get(timeout=IDLE_S_MAX)
        return None

    def _read(self, input_file: int) -> None:
        rest = b""
        while read := os.read(input_file, 65536):  # of the file itself: a lock of `sys.stdin` would outlive the thread
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                if line.startswith(b"log "):
                    log_lines.set_up_as(line[len(b"log ") :].decode())
                else:
                    self._queue.put(json.loads(line))
        os.close(input_file)
        self._queue.put(None)


if __name__ == "__main__":
    sys.exit(main())
