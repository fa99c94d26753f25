"""`Appliers` finds the jobs in the change logs, runs an applier process per job, and updates the `JobCatalog`.

Each job has a process of its own, so a heavy job does not delay the epochs of others. All methods run on the server's
event loop. Listing a log's jobs runs in a thread, because the log's storage may be slow.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import shutil
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from resp_server.net import children
from resp_server.serving.job_catalog import ApplierEvent, JobCatalog
from resp_server.serving.log_watch import LogWatch
from state_backend import log_lines
from state_backend.apply.idle_job import IdleJob
from state_backend.log.change_log import ChangeLog
from state_backend.log.garbage_collector import RETENTION_MS
from state_backend.log.identity import identity_of
from state_backend.log.time_travel import Moment
from state_backend.model.clock import now_ms
from state_backend.model.errors import SparkisError, StoreError
from state_backend.model.slot_set import ALL, NONE, SlotSet
from state_backend.store.keyspace import RECENT_EPOCHS

logger = logging.getLogger("sparkis.server")

# The shortest pause between two listings of a log's jobs without a notice. Without a new job it doubles up to the
# filesystem's limit.
LISTING_S = 1.0
STOP_TIMEOUT_S = 5.0
# The applier of a job without a new epoch for this long ends until there is one (guess). Its process takes about 100 MB
# of memory, and half a second to start.
REST_AFTER_S = 60.0
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

    digest: that of the epoch's file; None if it is unknown. log: the root of the job's log; empty in an older server's
    report.
    """

    generation: str
    term: int
    epoch: int
    digest: int | None = None
    log: str = ""


class ApplierProcess:
    """The applier process of one job, restarted when it ends, and the state of the job.

    While the job is at rest (see `state_backend.apply.idle_job`) it has no applier process; this process polls the log.

    owned: the desired slots that are readable. visible: an epoch that all readers have reached. Both are None until the
    job is served; `changed` is called when they may have changed. log_watch: notices this process of new files in
    the folders that the process reports.
    """

    def __init__(
        self,
        catalog: JobCatalog,
        log: str,
        job: str,
        folder: Path,
        *,
        retention_ms: int | None,
        slots: SlotSet,
        records_events: bool,
        changed: Callable[[], None],
        rest_after_s: float,
        probe_interval_s: float | None,
        log_watch: LogWatch,
        moment: Moment | None = None,
    ) -> None:
        self._moment = moment
        self._log_watch = log_watch
        self._probe_interval_s = probe_interval_s
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
        self._folder = folder
        self._retention_ms = retention_ms
        self._process: asyncio.subprocess.Process | None = None
        self._full_until_s = -math.inf
        self._is_served = False
        self._is_store_trusted = True
        self._readable = -1
        self._rest_after_s = rest_after_s
        self._has_rested = False
        self._rest: ApplierEvent | None = None  # the last line of a process that ended because the job rests
        self._woken = asyncio.Event()
        self._newest_epoch: tuple[int, int] | None = None
        # The epochs that the processes of this job have applied, and the time in ns; `_former`: those that have ended.
        self._applied = self._former_applied = (0, 0)
        self._recent_epochs: deque[tuple[int, int]] = deque(maxlen=RECENT_EPOCHS)
        self.opened = asyncio.Event()
        self._waiting: set[tuple[int, asyncio.Future[bool]]] = set()
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
        if self._readable >= epoch:
            return True
        self._woken.set()
        reached = asyncio.get_running_loop().create_future()
        waiting = (epoch, reached)
        self._waiting.add(waiting)
        try:
            return await asyncio.wait_for(reached, timeout_s)
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(waiting)

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
        first_s = job.poll_interval_s if self._probe_interval_s is None else self._probe_interval_s
        interval_s, is_stale = first_s, rest["is_stale"]
        # These differ at once if a line was sent after the process had last read its input.
        while (rest["slots_lines"], rest["records_events"]) == (self._slots_lines, self._records_events):
            self._woken.clear()
            if await asyncio.to_thread(job.has_work):
                return
            if job.is_stale != is_stale:
                is_stale = job.is_stale
                self._catalog.update(self.name, {"is_stale": is_stale})
            remaining_s = math.inf if rest["wake_at_ms"] is None else (rest["wake_at_ms"] - now_ms()) / 1000
            if remaining_s <= 0:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), min(interval_s, remaining_s))
                return
            interval_s = min(2 * interval_s, max(first_s, job.poll_interval_s_max))

    async def _run(self) -> None:
        """Run one applier process until it ends."""
        command = [sys.executable, "-m", "state_backend.apply.applier"]
        command += ["--log", self.log, "--job", self.name, "--store", str(self._folder)]
        if self._probe_interval_s is not None:
            command += ["--probe-interval-s", str(self._probe_interval_s)]
        slots = self._desired
        if slots != ALL:
            command += ["--slots", str(slots)]
        if self._retention_ms is not None:
            command += ["--compact", "--retention-ms", str(self._retention_ms)]
        records_events = self._records_events
        command += ["--events"] if records_events else []
        command += [] if self._is_store_trusted else ["--delete-stores"]
        command += ["--rest-after-s", str(self._rest_after_s)] if self._rest_after_s < math.inf else []
        if self._moment is not None:
            command += ["--moment", *map(str, self._moment)]
        command += ["--verified"] if self._has_rested else []
        self._is_store_trusted, self._has_rested = True, False
        self._former_applied, inherited = self._applied, log_lines.inherited()
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
            epochs, spent_ns = self._former_applied
            self._applied = (epochs + event["applied_epochs"], spent_ns + event["apply_ns"])
            fields = {
                "applied_epochs": self._applied[0],
                "apply_ns": self._applied[1],
                "committed_epoch": event.get("committed", -1),
                "committed_clock_ms": event.get("committed_clock_ms", 0),
                "recent_epochs": self._recent_epochs_with(event),
                "is_incomplete": event["is_incomplete"],
                "skipped_rows": event.get("skipped_rows", 0),
                "held_back_epoch": event["held_back_epoch"],
                "held_back_since_ms": event["held_back_since_ms"],
                "is_stale": event["is_stale"],
                "error": event["error"],
                "state_bytes": event["state_bytes"],
            }
            self._catalog.update(self.name, fields)
            self._apply_room(event["is_full"])
            if event["error"]:
                self.opened.set()
            if self._is_served:
                self._apply_event(event)
                self._wake_waiters(event["applied"])

    def _recent_epochs_with(self, event: ApplierEvent) -> list[tuple[int, int]]:
        """Add a newly applied epoch to the recent ones; return them."""
        epoch = event["term"], event["applied"]
        if epoch != self._newest_epoch and event["applied"] >= 0:
            self._recent_epochs.append((event["committed_clock_ms"], event["changes"]))
            self._newest_epoch = epoch
        return list(self._recent_epochs)

    def _hide(self) -> None:
        """Have readers close the damaged store; the applier builds a new one."""
        if self._is_served:
            logger.error("job %s: its store is damaged; it is not read until it is rebuilt from the log", self.name)
        self._is_served, self._readable = False, -1
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

    def _wake_waiters(self, epoch: int) -> None:
        """Wake the waiters of a readable epoch."""
        self._readable = epoch
        for epoch_to_reach, reached in self._waiting:
            if epoch >= epoch_to_reach and not reached.done():
                reached.set_result(True)

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


class _ListingSchedule:
    """The schedule of a log's listings."""

    def __init__(self) -> None:
        self.due_s = -math.inf
        self._interval_s = LISTING_S

    def done(self, *, has_new_jobs: bool, interval_s_max: float) -> None:
        """Schedule the next listing."""
        self.due_s = asyncio.get_running_loop().time() + self._interval_s - LISTING_S / 2
        self._interval_s = LISTING_S if has_new_jobs else min(2 * self._interval_s, interval_s_max)


class _Listing(NamedTuple):
    """The jobs of a log, its identity, empty for none, and the folders in which new jobs begin (see `ChangeLog`)."""

    jobs: list[str]
    identity: str
    folders: list[str]

    @classmethod
    def of(cls, log: ChangeLog) -> _Listing:
        """List a log. Its identity is read after its jobs: a job's writer begins after the log has one."""
        jobs = log.jobs()
        return cls(jobs, identity_of(log.filesystem) or "", log.folders_of_new_jobs(jobs))


def _watched_as(root: str) -> str:
    """Return the name by which a log's root is watched: no job has it, as jobs have no slash in their names."""
    return f"{root}/"


class Appliers:
    """The appliers of all jobs of some log roots.

    compacted: the logs that the appliers keep short by snapshots. retention_ms: how long these keep files that a
    snapshot replaces.
    slots: the slots that the appliers own; `set_desired_slots` changes them.
    rest_after_s: a job without a new epoch for this long has no applier process until its next epoch.
    probe_interval_s: the first interval between polls of a log without news; None: that of the log's filesystem.
    moments: a past moment of each job to serve, by log and name. Then no log is followed, and no other job is served.
    on_change: called on the event loop's thread when `owned_slots` or `visible` has changed.
    """

    def __init__(
        self,
        catalog: JobCatalog,
        logs: list[str],
        folder: Path,
        *,
        retention_ms: int = RETENTION_MS,
        compacted: Collection[str] = (),
        slots: SlotSet = ALL,
        records_events: bool = False,
        rest_after_s: float = REST_AFTER_S,
        probe_interval_s: float | None = None,
        moments: Mapping[tuple[str, str], Moment] | None = None,
    ) -> None:
        self._moments = moments
        self._rest_after_s = rest_after_s
        self._probe_interval_s = probe_interval_s
        self._compacted = frozenset(compacted)
        self._records_events = records_events
        self.on_change: Callable[[], None] = lambda: None
        self._desired = slots
        self._has_caught_up = False
        self._owned_slots = NONE
        self._visible: Mapping[str, Visible] = {}
        self._identities: dict[str, str | None] = dict.fromkeys(logs)
        self._catalog = catalog
        self._retention_ms = retention_ms
        self._logs = {log: ChangeLog(log) for log in logs}
        self._folder = folder
        self._appliers: dict[str, ApplierProcess] = {}
        self._notices: dict[str, asyncio.Task[None]] = {}
        self._refused: set[tuple[str, str]] = set()
        self._unreachable: set[str] = set()
        self._listed: set[str] = set()
        self._schedules = {root: _ListingSchedule() for root in logs}
        self._task: asyncio.Task[None] | None = None
        self._log_watch: LogWatch | None = None
        self._is_listing = asyncio.Lock()
        self._noticed: set[str] = set()  # logs to list, by their roots
        self._listing: asyncio.Task[None] | None = None  # of `_noticed`, while it has not begun
        self._listings: set[asyncio.Task[None]] = set()
        self._listing_due_s = 0.0
        self._folders_of_new_jobs: dict[str, list[str]] = {root: [] for root in logs}  # the watched ones, by root

    @property
    def owned_slots(self) -> SlotSet:
        """The desired slots that every served job owns, so reads of them can be answered; none before `catch_up`."""
        return self._owned_slots

    @property
    def missing_slots(self) -> SlotSet:
        """The desired slots that are not owned yet."""
        return self._desired - self._owned_slots

    @property
    def idle(self) -> Collection[str]:
        """The jobs at rest."""
        return [name for name, each in self._appliers.items() if each.is_idle]

    @property
    def visible(self) -> Mapping[str, Visible]:
        """An epoch of each served job that all readers have reached."""
        return self._visible

    @property
    def identities(self) -> Mapping[str, str | None]:
        """The identity of each log, by its root; empty: it has none; None: it was not read yet."""
        return self._identities

    @property
    def has_room(self) -> bool:
        """Whether all stores have been writable for `ROOM_AFTER_S`."""
        return all(applier.has_room for applier in self._appliers.values())

    def set_desired_slots(self, slots: SlotSet) -> None:
        """Own these slots and no others. Lost slots are dropped at once; gained ones are owned once they are loaded."""
        if slots == self._desired:
            return
        logger.info("desired slots: %s", slots or "none")
        self._desired = slots
        for applier in self._appliers.values():
            applier.set_desired_slots(slots)
        self._recompute()

    def record_events(self, is_on: bool) -> None:
        """Switch the appliers' recording of key events, for keyspace notifications, on or off."""
        self._records_events = is_on
        for applier in self._appliers.values():
            applier.record_events(is_on)

    def _set_up_log(self, inherited: str) -> None:
        for applier in self._appliers.values():
            applier.set_up_log(inherited)

    def _recompute(self) -> None:
        """Recompute `owned_slots` and `visible`; call `on_change` if they have changed."""
        served = {name: each.visible for name, each in self._appliers.items() if each.visible is not None}
        owned = self._desired if self._has_caught_up else NONE
        for applier in self._appliers.values():
            if owned and applier.owned is not None and applier.owned != owned:
                owned &= applier.owned
        if (owned, served) != (self._owned_slots, self._visible):
            self._owned_slots, self._visible = owned, served
            self.on_change()

    async def start(self) -> None:
        """Start an applier for each job, and list the logs for new jobs from then on."""
        log_lines.on_set_up.append(self._set_up_log)
        self._log_watch = LogWatch(self._notice)
        await self._list_jobs()
        if self._moments is None:
            self._task = asyncio.create_task(self._list_forever())

    async def catch_up(self) -> None:
        """Wait until every log was listed once, and each of their jobs is served or has an error."""
        while len(self._listed) < len(self._logs):
            await asyncio.sleep(LISTING_S / 10)
        await asyncio.gather(*(applier.opened.wait() for applier in self._appliers.values()))
        self._has_caught_up = True
        self._recompute()

    async def stop(self) -> None:
        """Stop all appliers."""
        if self._set_up_log in log_lines.on_set_up:
            log_lines.on_set_up.remove(self._set_up_log)
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await asyncio.gather(*(applier.stop() for applier in self._appliers.values()))
        self._appliers.clear()
        for listing in self._listings:
            listing.cancel()
        if self._log_watch is not None:
            await self._log_watch.stop()

    async def notice(self, job: str, epoch: int = -1, term: int = 0) -> None:
        """Have a job's log checked for an announced epoch at once; it may be a new job."""
        if job not in self._appliers:
            await asyncio.shield(self._list_soon(self._logs))
        if job in self._appliers:
            self._appliers[job].announce(term, epoch)

    def notice_soon(self, job: str, epoch: int = -1, term: int = 0) -> None:
        """Notice in the background, because storage may hang, and once at a time for each job."""
        if job not in self._notices:
            self._notices[job] = asyncio.create_task(self.notice(job, epoch, term))
            self._notices[job].add_done_callback(lambda _: self._notices.pop(job))

    def _list_soon(self, roots: Iterable[str]) -> asyncio.Task[None]:
        """Have some logs listed, once for all notices before the listing begins; return the task that does it."""
        self._noticed.update(roots)
        if self._listing is None:
            self._listing = asyncio.create_task(self._list_noticed())
            self._listings.add(self._listing)
            self._listing.add_done_callback(self._listings.discard)
        return self._listing

    async def _list_noticed(self) -> None:
        """List the logs of notices, with a pause after the last time: a listing of an object store costs money."""
        async with self._is_listing:
            loop = asyncio.get_running_loop()
            await asyncio.sleep(max(0.0, self._listing_due_s - loop.time()))
            logs = {root: self._logs[root] for root in self._noticed}
            self._noticed, self._listing = set(), None  # later notices have the next listing
            self._listing_due_s = loop.time() + max(log.filesystem.probe_interval_s_min for log in logs.values())
            for root, log in logs.items():
                await self._list_log(root, log)

    def _notice(self, name: str) -> None:
        """Take a notice of the watch: a job has a new file, or a new job may have begun."""
        if name in self._appliers:
            self._appliers[name].notice()
        elif roots := [root for root in self._logs if _watched_as(root) == name]:
            self._list_soon(roots)

    async def wait(self, job: str, epoch: int, timeout_s: float) -> bool:
        """Wait until all readers can read an epoch of a job; False after the timeout."""
        if job not in self._appliers:
            await self._list_jobs()
        return job in self._appliers and await self._appliers[job].wait(epoch, timeout_s)

    async def _list_forever(self) -> None:
        while True:
            await asyncio.sleep(LISTING_S)
            now_s = asyncio.get_running_loop().time()
            await self._list_jobs({root for root, schedule in self._schedules.items() if now_s >= schedule.due_s})

    async def _list_jobs(self, roots: Collection[str] | None = None) -> None:
        """List the jobs of some logs, or of all logs."""
        async with self._is_listing:
            for root, log in self._logs.items():
                if roots is None or root in roots:
                    await self._list_log(root, log)

    async def _list_log(self, root: str, log: ChangeLog) -> None:
        """List the jobs of a log. The caller has `_is_listing`."""
        existing = len(self._appliers)
        interval_s_max = log.filesystem.jobs_interval_s_max
        try:
            jobs, identity, folders = await asyncio.to_thread(_Listing.of, log)
        except SparkisError as error:
            if root not in self._unreachable:
                self._unreachable.add(root)
                logger.error("%s; the current jobs stay", error)
            self._schedules[root].done(has_new_jobs=False, interval_s_max=interval_s_max)
            return
        if identity != self._identities[root]:
            self._identities = {**self._identities, root: identity}
            self.on_change()
        self._unreachable.discard(root)
        if not jobs and root not in self._listed:
            logger.info("no jobs found in %s; is it the log's root? A job is served as soon as its query runs", root)
        self._listed.add(root)
        for job in jobs:
            self._add_applier(root, job)
        for job in [name for name, each in self._appliers.items() if each.log == root and name not in jobs]:
            await self._remove_if_dropped(log, job, jobs)
        if folders != self._folders_of_new_jobs[root] and self._moments is None:
            assert self._log_watch is not None
            self._folders_of_new_jobs[root] = folders
            self._log_watch.watch(_watched_as(root), folders)
        self._schedules[root].done(has_new_jobs=len(self._appliers) != existing, interval_s_max=interval_s_max)

    async def _remove_if_dropped(self, log: ChangeLog, job: str, jobs: list[str]) -> None:
        """Stop serving a dropped job, unless it was renamed and is not served under the new name yet.

        A job that is missing in a listing but not dropped stays: the log's storage may be unavailable.
        """
        try:
            term = await asyncio.to_thread(log.job(job).dropped)
        except SparkisError as error:
            logger.error("%s; the current jobs stay", error)
            return
        if term is None or (term.renamed_to in jobs and not self._is_served(term.renamed_to)):
            return
        await self._appliers.pop(job).stop()
        assert self._log_watch is not None
        self._log_watch.forget(job)
        self._catalog.remove(job)
        self._recompute()
        await asyncio.to_thread(shutil.rmtree, self._folder / job, ignore_errors=True)
        logger.info("job %s: %s", job, "dropped" if term.renamed_to is None else f"renamed to {term.renamed_to}")

    def _is_served(self, job: str | None) -> bool:
        return job in self._appliers and self._appliers[job].renamed_from is not None

    def _add_applier(self, root: str, job: str) -> None:
        existing = self._appliers.get(job)
        if self._moments is not None and (root, job) not in self._moments:
            return
        if existing is None:
            assert self._log_watch is not None
            self._appliers[job] = ApplierProcess(
                self._catalog,
                root,
                job,
                self._folder,
                retention_ms=self._retention_ms if root in self._compacted else None,
                slots=self._desired,
                records_events=self._records_events,
                changed=self._recompute,
                rest_after_s=self._rest_after_s,
                probe_interval_s=self._probe_interval_s,
                log_watch=self._log_watch,
                moment=None if self._moments is None else self._moments[root, job],
            )
        elif existing.log != root and (root, job) not in self._refused:
            self._refused.add((root, job))
            logger.error(
                "job %s is in the logs %s and %s; only the first is served: rename one", job, existing.log, root
            )
