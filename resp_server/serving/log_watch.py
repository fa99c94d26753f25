"""Watches the local folders of jobs' logs, so that a job's applier looks as soon as an epoch is committed.

The folders in which new jobs begin are watched, too: then the name of a job is the one that `appliers` has for the log.
One watch serves all jobs of a server, also those at rest: the system limits their number for each user. Files that
another machine names in a shared folder make no events, and neither does an object store. There announcements notify
the appliers, which also look by themselves.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable, Collection, Sequence

from state_backend.folder_watch import FolderEvents

logger = logging.getLogger("sparkis.server")

# The errors of a folder that will be requested again when it is there, and of a watch whose end was logged before.
EXPECTED = (errno.ENOENT, errno.ENOTDIR, errno.EBADF)


class LogWatch:
    """Calls `notice` with a job when a file got its name in one of the job's folders. For the event loop's thread."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice = notice
        self._events = FolderEvents()
        self._jobs: dict[str, str] = {}  # by watched folder
        self._requested: dict[str, Sequence[str]] = {}  # the folders of jobs, to be watched
        self._adding: asyncio.Task[None] | None = None
        self._has_warned = False
        if self._events.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._events.fileno(), self._read)
        elif self._events.error:
            self._warn(f"inotify: {self._events.error}")

    def watch(self, job: str, folders: Sequence[str]) -> None:
        """Watch these folders of a job, and no others of it. The job is noticed soon if one was not watched before."""
        self._requested[job] = folders
        if self._adding is None or self._adding.done():
            self._adding = asyncio.create_task(self._add())

    def forget(self, job: str) -> None:
        """End the watch of a job's folders."""
        self._requested.pop(job, None)
        self._forget_others(job, ())

    async def stop(self) -> None:
        """End the watch of all folders."""
        if self._events.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._events.fileno())
        if self._adding is not None:
            self._adding.cancel()
        self._events.close()

    async def _add(self) -> None:
        """Add the requested folders, one at a time in a thread: storage may hang, and then takes one thread."""
        while self._requested:
            job, folders = self._requested.popitem()
            self._forget_others(job, folders)
            has_new = False
            for folder in folders:
                number = await asyncio.to_thread(self._events.find, folder)
                if number < 0 and -number not in EXPECTED:
                    self._warn(f"{folder}: {os.strerror(-number)}")
                has_new |= self._events.add(folder, number)
                self._jobs[folder] = job
            if has_new:
                self._notice(job)  # of files that came before the watch

    def _warn(self, reason: str) -> None:
        """Log the first reason for which folders cannot be watched: epochs are only late."""
        if not self._has_warned:
            logger.warning(
                "a log's folder cannot be watched, so its epochs are found by polls, which is later: %s. If a limit is "
                "reached, raise fs.inotify.max_user_instances, fs.inotify.max_user_watches or the limit of open files, "
                "and start the server again",
                reason,
            )
        self._has_warned = True

    def _forget_others(self, job: str, folders: Collection[str]) -> None:
        for folder in [each for each, owner in self._jobs.items() if owner == job and each not in folders]:
            self._events.remove(folder)
            del self._jobs[folder]

    def _read(self) -> None:
        for job in {self._jobs[folder] for folder in self._events.read() if folder in self._jobs}:
            self._notice(job)
