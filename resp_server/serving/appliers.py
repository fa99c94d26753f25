"""`Appliers` finds the jobs in the change logs, runs an applier process per job, and updates the `JobCatalog`.

Each job has a process of its own, so a heavy job does not delay the epochs of others. All methods run on the server's
event loop. Listing a log's jobs runs in a thread, because the log's storage may be slow.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from resp_server.serving.applier_process import ApplierOptions, ApplierProcess, Visible
from resp_server.serving.job_catalog import JobCatalog
from resp_server.serving.log_watch import LogWatch
from state_backend import log_lines
from state_backend.log.change_log import ChangeLog
from state_backend.log.garbage_collector import RETENTION_MS
from state_backend.log.identity import identity_of
from state_backend.log.time_travel import Moment
from state_backend.model.errors import SparkisError
from state_backend.model.slot_set import ALL, NONE, SlotSet

logger = logging.getLogger("sparkis.server")

# The shortest pause between two listings of a log's jobs without a notice. Without a new job it doubles up to the
# filesystem's limit.
LISTING_S = 1.0
# The applier of a job without a new epoch for this long ends until there is one (guess). Its process takes about 100 MB
# of memory, and half a second to start.
REST_AFTER_S = 60.0


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


class _ServedLog:
    """One of the logs, with the result of its last listing and the schedule of the next one."""

    def __init__(self, root: str, options: ApplierOptions) -> None:
        self.root = root
        self.options = options
        self.log = ChangeLog(root)
        self.identity: str | None = None  # empty: it has none; None: it was not read yet
        self.is_listed = False
        self.is_unreachable = False
        self.folders_of_new_jobs: list[str] = []  # the watched ones
        self.due_s = -math.inf
        self._interval_s = LISTING_S

    def schedule_next(self, *, has_new_jobs: bool) -> None:
        """Schedule the next listing: soon after a new job, and ever later without one."""
        self.due_s = asyncio.get_running_loop().time() + self._interval_s - LISTING_S / 2
        interval_s_max = self.log.filesystem.jobs_interval_s_max
        self._interval_s = LISTING_S if has_new_jobs else min(2 * self._interval_s, interval_s_max)


class Appliers:
    """The appliers of all jobs of some log roots.

    Args:
        compacted: The logs that the appliers keep short by snapshots.
        retention_ms: How long these keep files that a snapshot replaces.
        slots: The slots that the appliers own; `set_desired_slots` changes them.
        rest_after_s: A job without a new epoch for this long has no applier process until its next epoch.
        probe_interval_s: The first interval between polls of a log without news; None: that of the log's filesystem.
        moments: A past moment of each job to serve, by log and name. Then no log is followed, and no other job is
            served.

    Attributes:
        on_change: Called on the event loop's thread when `owned_slots` or `visible` has changed.
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
        self._records_events = records_events
        self.on_change: Callable[[], None] = lambda: None
        self._desired = slots
        self._has_caught_up = False
        self._owned_slots = NONE
        self._visible: Mapping[str, Visible] = {}
        self._catalog = catalog
        options = ApplierOptions(folder, None, rest_after_s, probe_interval_s)
        compacting = options._replace(retention_ms=retention_ms)
        self._logs = {root: _ServedLog(root, compacting if root in compacted else options) for root in logs}
        self._folder = folder
        self._appliers: dict[str, ApplierProcess] = {}
        self._notices: dict[str, asyncio.Task[None]] = {}
        self._refused: set[tuple[str, str]] = set()
        self._task: asyncio.Task[None] | None = None
        self._log_watch: LogWatch | None = None
        self._is_listing = asyncio.Lock()
        self._noticed: set[str] = set()  # logs to list, by their roots
        self._listing: asyncio.Task[None] | None = None  # of `_noticed`, while it has not begun
        self._listings: set[asyncio.Task[None]] = set()
        self._listing_due_s = 0.0

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
        return {root: each.identity for root, each in self._logs.items()}

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
        while not all(each.is_listed for each in self._logs.values()):
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
            logs = [self._logs[root] for root in self._noticed]
            self._noticed, self._listing = set(), None  # later notices have the next listing
            self._listing_due_s = loop.time() + max(each.log.filesystem.probe_interval_s_min for each in logs)
            for each in logs:
                await self._list_log(each)

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
            await self._list_jobs([each for each in self._logs.values() if now_s >= each.due_s])

    async def _list_jobs(self, logs: Collection[_ServedLog] | None = None) -> None:
        """List the jobs of some logs, or of all logs."""
        async with self._is_listing:
            for each in self._logs.values() if logs is None else logs:
                await self._list_log(each)

    async def _list_log(self, served: _ServedLog) -> None:
        """List the jobs of a log. The caller has `_is_listing`."""
        root, existing = served.root, len(self._appliers)
        try:
            jobs, identity, folders = await asyncio.to_thread(_Listing.of, served.log)
        except SparkisError as error:
            if not served.is_unreachable:
                served.is_unreachable = True
                logger.error("%s; the current jobs stay", error)
            served.schedule_next(has_new_jobs=False)
            return
        if served.identity and not identity and not jobs:
            # No program removes an identity: the folder that was mounted here is away, and another log is not here.
            if not served.is_unreachable:
                served.is_unreachable = True
                logger.error("the log %s is empty; is its storage mounted? The current jobs stay", root)
            served.schedule_next(has_new_jobs=False)
            return
        if identity != served.identity:
            served.identity = identity
            self.on_change()
        served.is_unreachable = False
        if not jobs and not served.is_listed:
            logger.info("no jobs found in %s; is it the log's root? A job is served as soon as its query runs", root)
        served.is_listed = True
        for job in jobs:
            self._add_applier(served, job)
        for job in [name for name, each in self._appliers.items() if each.log == root and name not in jobs]:
            await self._remove_if_dropped(served.log, job, jobs)
        if folders != served.folders_of_new_jobs and self._moments is None:
            assert self._log_watch is not None
            served.folders_of_new_jobs = folders
            self._log_watch.watch(_watched_as(root), folders)
        served.schedule_next(has_new_jobs=len(self._appliers) != existing)

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

    def _add_applier(self, served: _ServedLog, job: str) -> None:
        root, existing = served.root, self._appliers.get(job)
        if self._moments is not None and (root, job) not in self._moments:
            return
        if existing is None:
            assert self._log_watch is not None
            self._appliers[job] = ApplierProcess(
                self._catalog,
                root,
                job,
                served.options._replace(moment=None if self._moments is None else self._moments[root, job]),
                slots=self._desired,
                records_events=self._records_events,
                changed=self._recompute,
                log_watch=self._log_watch,
            )
        elif existing.log != root and (root, job) not in self._refused:
            self._refused.add((root, job))
            logger.error(
                "job %s is in the logs %s and %s; only the first is served: rename one", job, existing.log, root
            )
