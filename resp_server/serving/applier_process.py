"""The applier process of one job: its start, its lines, its restart, and the polls of the log while there is none."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from resp_server.net import children
from resp_server.serving.job_catalog import ApplierEvent, JobCatalog
from resp_server.serving.log_watch import LogWatch
from state_backend import log_lines
from state_backend.apply.idle_job import IdleJob
from state_backend.apply.record_delays import joined
from state_backend.log.time_travel import Moment
from state_backend.model.clock import now_ms
from state_backend.model.errors import SparkisError, StoreError
from state_backend.model.slot_set import ALL, NONE, SlotSet
from state_backend.store.keyspace import RECENT_EPOCHS

logger = logging.getLogger("sparkis.server")

STOP_TIMEOUT_S = 5.0
# A store that was full must be writable for this long before `has_room` is true. The room may come only from slots
# that were dropped when it was full (guess).
ROOM_AFTER_S = 30.0
# The limit of a line from an applier, which has the job's descriptors. asyncio's default of 64 KiB is too small for
# many states.
EVENT_BYTES_MAX = 16 << 20
# Names of a job's states in the line of the log that says that the job is served (guess).
STATES_LOGGED_MAX = 10


class Visible(NamedTuple):
    """The generation and epoch that readers see of a job. Epochs are ordered by (term, epoch); terms only grow.

    Args:
        digest: The digest of the epoch's file; None if it is unknown.
        log: The root of the job's log; empty in an older server's report.
    """

    generation: str
    term: int
    epoch: int
    digest: int | None = None
    log: str = ""


class ApplierOptions(NamedTuple):
    """The options of an applier process that never change.

    Args:
        retention_ms: How long files remain that a snapshot replaces; None: the process writes no snapshots.
        rest_after_s: The process ends after this long without work.
        probe_interval_s: The first interval between polls; None: that of the log's filesystem.
        moment: The past moment to serve; None: the log is followed.
    """

    folder: Path
    retention_ms: int | None
    rest_after_s: float
    probe_interval_s: float | None
    moment: Moment | None = None

    def command(self, log: str, job: str, slots: SlotSet) -> list[str]:
        """Return the command that starts a process."""
        command = [sys.executable, "-m", "state_backend.apply.applier"]
        command += ["--log", log, "--job", job, "--store", str(self.folder)]
        if self.probe_interval_s is not None:
            command += ["--probe-interval-s", str(self.probe_interval_s)]
        if slots != ALL:
            command += ["--slots", str(slots)]
        if self.retention_ms is not None:
            command += ["--compact", "--retention-ms", str(self.retention_ms)]
        if self.rest_after_s < math.inf:
            command += ["--rest-after-s", str(self.rest_after_s)]
        if self.moment is not None:
            command += ["--moment", *map(str, self.moment)]
        return command


class AppliedEpochs:
    """The epochs that the processes of a job have applied."""

    def __init__(self) -> None:
        # The number of epochs, and the time in ns; `_former`: of the processes that have ended.
        self._total = self._former = (0, 0)
        self._delays: Mapping[str, Any] | None = None
        self._former_delays: Mapping[str, Any] | None = None
        self._newest: tuple[int, int] | None = None
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT_EPOCHS)

    def begin_process(self) -> None:
        """Record that a new process begins, which counts from zero."""
        self._former, self._former_delays = self._total, self._delays

    def fields_with(self, event: ApplierEvent) -> dict[str, Any]:
        """Add a process' report, and return the fields of the job."""
        epochs, spent_ns = self._former
        self._total = (epochs + event["applied_epochs"], spent_ns + event["apply_ns"])
        self._delays = joined(self._former_delays, event["record_delays"])
        epoch = event["term"], event["applied"]
        if epoch != self._newest and event["applied"] >= 0:
            self._recent.append((event["committed_clock_ms"], event["changes"]))
            self._newest = epoch
        return {
            "applied_epochs": self._total[0],
            "apply_ns": self._total[1],
            "recent_epochs": list(self._recent),
            "record_delays": self._delays,
        }


class EpochWaiters:
    """Waits until all readers can read an epoch of a job. readable: the last such epoch; -1: none."""

    def __init__(self) -> None:
        self.readable = -1
        self._waiting: set[tuple[int, asyncio.Future[bool]]] = set()

    async def wait(self, epoch: int, timeout_s: float) -> bool:
        """Wait until an epoch is readable; False after the timeout."""
        reached = asyncio.get_running_loop().create_future()
        waiting = (epoch, reached)
        self._waiting.add(waiting)
        try:
            return await asyncio.wait_for(reached, timeout_s)
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(waiting)

    def reached(self, epoch: int) -> None:
        """Wake the waiters of a readable epoch."""
        self.readable = epoch
        for epoch_to_reach, reached in self._waiting:
            if epoch >= epoch_to_reach and not reached.done():
                reached.set_result(True)


class ApplierProcess:
    """The applier process of one job, restarted when it ends, and the state of the job.

    While the job is at rest (see `state_backend.apply.idle_job`) it has no applier process; this process polls the log.

    Args:
        log_watch: Notices this process of new files in the folders that the process reports.

    Attributes:
        owned: The desired slots that are readable. None: the job is not served yet.
        visible: An epoch that all readers have reached. None: the job is not served yet.
        changed: Called when `owned` or `visible` may have changed.
    """

    def __init__(
        self,
        catalog: JobCatalog,
        log: str,
        job: str,
        options: ApplierOptions,
        *,
        slots: SlotSet,
        records_events: bool,
        changed: Callable[[], None],
        log_watch: LogWatch,
    ) -> None:
        self._options = options
        self._log_watch = log_watch
        self.log = log
        self.name = job
        # Set when the job is served; empty if the job was not renamed.
        self.renamed_from: str | None = None
        self.owned: SlotSet | None = None
        self.visible: Visible | None = None
        self._desired = slots
        # The number of `slots` lines sent to this process.
        self._slots_lines = 0
        self._records_events = records_events
        self._loading = ""
        self._is_incomplete = False
        self._changed = changed
        self._catalog = catalog
        self._process: asyncio.subprocess.Process | None = None
        self._full_until_s = -math.inf
        self._is_served = False
        self._is_store_trusted = True
        self._has_rested = False
        self._rest: ApplierEvent | None = None  # the last line of a process that ended because the job rests
        self._woken = asyncio.Event()
        self._applied = AppliedEpochs()
        self._waiters = EpochWaiters()
        self.opened = asyncio.Event()
        catalog.announce(job)
        self._task = asyncio.create_task(self._keep_running())

    def notice(self) -> None:
        """Have the applier check the log at once."""
        self._send(b"\n")

    def announce(self, term: int, epoch: int) -> None:
        """Have the applier look for an announced epoch; term 0: an older driver does not know it."""
        self._send(b"epoch %d %d\n" % (max(0, term), epoch))

    @property
    def is_idle(self) -> bool:
        """Whether the job has no process, because there is nothing to apply."""
        return self._rest is not None and self._process is not None and self._process.returncode is not None

    def set_desired_slots(self, slots: SlotSet) -> None:
        """Set the slots that the applier owns. `owned` may shrink; `changed` is not called for that."""
        self._desired = slots
        if self.owned is not None:
            self.owned &= slots
        self._send_slots()

    def record_events(self, is_on: bool) -> None:
        """Switch the applier's recording of key events on or off."""
        self._records_events = is_on
        self._send(b"events on\n" if is_on else b"events off\n")

    def set_up_log(self, inherited: str) -> None:
        """Have the applier log as a value of `log_lines.CHILD_VARIABLE` says."""
        self._send(b"log %b\n" % inherited.encode())

    def _send_slots(self) -> None:
        self._slots_lines += 1
        self._send(b"slots %b\n" % str(self._desired).encode())

    def _send(self, line: bytes) -> None:
        self._woken.set()
        if self._process is not None and self._process.stdin is not None and self._rest is None:
            with suppress(ConnectionError, RuntimeError):
                self._process.stdin.write(line)

    async def wait(self, epoch: int, timeout_s: float) -> bool:
        """Wait until all readers can read an epoch or a later one; False after the timeout."""
        if self._waiters.readable >= epoch:
            return True
        self._woken.set()
        return await self._waiters.wait(epoch, timeout_s)

    @property
    def has_room(self) -> bool:
        """Whether the store has been writable for `ROOM_AFTER_S`."""
        return asyncio.get_running_loop().time() >= self._full_until_s

    async def stop(self) -> None:
        """Stop the applier process."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self._end_process()

    async def _keep_running(self) -> None:
        pause = children.RestartPause()
        while True:
            pause.begin_run()
            try:
                await self._run()
            except OSError as error:
                logger.error("job %s: cannot start its applier: %s", self.name, error)
            if self._rest is not None:
                await self._wait_for_work(self._rest)
                self._rest = None
                continue
            self._catalog.update(self.name, {"is_stale": True})
            pause_s = pause.next_s()
            logger.warning("job %s: its applier ended; starting another in %s s", self.name, pause_s)
            await asyncio.sleep(pause_s)

    async def _wait_for_work(self, rest: ApplierEvent) -> None:
        """Poll the log of the job at rest until there is work for an applier, or a caller wakes the job."""
        logger.info("job %s: at rest", self.name)
        job = IdleJob(self.log, self.name, rest)
        probe_interval_s = self._options.probe_interval_s
        first_s = job.poll_interval_s if probe_interval_s is None else probe_interval_s
        interval_s, status = first_s, (rest["is_stale"], rest["source_lag"])
        # These differ at once if a line was sent after the process had last read its input.
        while (rest["slots_lines"], rest["records_events"]) == (self._slots_lines, self._records_events):
            self._woken.clear()
            if await asyncio.to_thread(job.has_work):
                return
            if (job.is_stale, job.source_lag) != status:
                status = job.is_stale, job.source_lag
                self._catalog.update(self.name, {"is_stale": job.is_stale, "source_lag": job.source_lag})
            remaining_s = math.inf if rest["wake_at_ms"] is None else (rest["wake_at_ms"] - now_ms()) / 1000
            if remaining_s <= 0:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), min(interval_s, remaining_s))
                return
            interval_s = min(2 * interval_s, max(first_s, job.poll_interval_s_max))

    async def _run(self) -> None:
        """Run one applier process until it ends."""
        slots, records_events = self._desired, self._records_events
        command = self._options.command(self.log, self.name, slots)
        command += ["--events"] if records_events else []
        command += [] if self._is_store_trusted else ["--delete-stores"]
        command += ["--verified"] if self._has_rested else []
        self._is_store_trusted, self._has_rested = True, False
        self._applied.begin_process()
        inherited = log_lines.inherited()
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=EVENT_BYTES_MAX,
            env=children.environment(),
            start_new_session=True,  # signals to all processes of a shell are for the server, which ends this one
        )
        self._process, self._slots_lines = process, 0
        if self._desired != slots:  # changed while the process started
            self._send_slots()
        if self._records_events != records_events:
            self.record_events(self._records_events)
        if log_lines.inherited() != inherited:
            self.set_up_log(log_lines.inherited())
        assert process.stdout is not None
        async for line in process.stdout:
            await self._take(json.loads(line))
        if -await process.wait() in children.CRASHES:
            self._is_store_trusted = False
            self._hide()

    async def _end_process(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()  # an applier ends when its input closes, after its current epoch
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _take(self, event: ApplierEvent) -> None:
        if "folders" in event:
            self._log_watch.watch(self.name, event["folders"])
        if event["event"] == "open":
            await self._open(event)
        elif event["event"] == "rest":
            self._rest, self._has_rested = event, True
        elif event["event"] == "damaged":
            self._hide()
        else:
            fields = {
                **self._applied.fields_with(event),
                "committed_epoch": event.get("committed", -1),
                "committed_clock_ms": event.get("committed_clock_ms", 0),
                "is_incomplete": event["is_incomplete"],
                "skipped_rows": event.get("skipped_rows", 0),
                "held_back_epoch": event["held_back_epoch"],
                "held_back_since_ms": event["held_back_since_ms"],
                "is_stale": event["is_stale"],
                "error": event["error"],
                "state_bytes": event["state_bytes"],
                "source_lag": event["source_lag"],
            }
            self._catalog.update(self.name, fields)
            self._apply_room(event["is_full"])
            if event["error"]:
                self.opened.set()
            if self._is_served:
                self._apply_event(event)
                self._waiters.reached(event["applied"])

    def _hide(self) -> None:
        """Have readers close the damaged store; the applier builds a new one."""
        if self._is_served:
            logger.error("job %s: its store is damaged; it is not read until it is rebuilt from the log", self.name)
        self._is_served, self._waiters.readable = False, -1
        self.owned = NONE
        self._catalog.hide(self.name)
        self._changed()

    def _apply_event(self, event: ApplierEvent) -> None:
        """Apply an applier's event about the served store."""
        slots = SlotSet.parse(event["slots"])
        if self.owned is None or event["slots_lines"] == self._slots_lines:
            self.owned = slots & self._desired
        else:
            # The applier has not read the last `slots` line yet. It may list a slot that it will drop and load again.
            self.owned &= slots
        if self._loading != event["loading"]:
            self._loading = event["loading"]
            owned, missing = event["slots"] or "none", self._loading or "none"
            logger.info("job %s: readable slots: %s; slots being loaded: %s", self.name, owned, missing)
        if event["is_incomplete"] and not self._is_incomplete:
            logger.warning(
                "job %s: its log begins after the query did, so keys that have not changed since are missing; "
                "start the query with a new checkpoint to have them all",
                self.name,
            )
        self._is_incomplete = event["is_incomplete"]
        generation = self.visible.generation if self.visible is not None else ""
        generation = event.get("generation", generation)
        self.visible = Visible(generation, event["term"], event["applied"], event.get("digest"), self.log)
        self._changed()

    def _apply_room(self, is_full: bool) -> None:
        if is_full:
            self._full_until_s = math.inf
        elif self._full_until_s == math.inf:
            self._full_until_s = asyncio.get_running_loop().time() + ROOM_AFTER_S

    async def _open(self, event: ApplierEvent) -> None:
        """Serve a store. Later events of the applier are about this store."""
        self._is_served = False
        try:
            await self._catalog.open(self.name, {**event, "log": self.log})
        except SparkisError as error:
            logger.error("%s", error)
            self.opened.set()
            if isinstance(error, StoreError) and self._process is not None and self._process.stdin is not None:
                self._process.stdin.close()  # an applier announces a store once; the next process does it again
            return
        self._is_served = True
        self._apply_event(event)
        self.renamed_from = event["renamed_from"]
        self.opened.set()
        names = [state["name"] for state in event["states"]]
        states = ", ".join(names[:STATES_LOGGED_MAX]) + (", ..." if len(names) > STATES_LOGGED_MAX else "")
        logger.info("job %s: serving generation %s, %d states: %s", self.name, event["generation"], len(names), states)
