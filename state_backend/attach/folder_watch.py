"""Waits for files that get their names in a folder, as files of a checkpoint do when they are complete.

Linux reports such files (inotify). It does not report files that another machine names in a shared folder, and other
systems have no inotify. So waits are short until the first event has come, and longer from then on. A file that was
found without an event makes them short again.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
from contextlib import suppress

# The pause between two checks without events. A check takes some 50 us of processor time, mostly to wake the thread.
PAUSE_S = 0.02
# With events: the longest time for which a missing event delays a file (guess).
WATCHED_PAUSE_S = 0.2
# From sys/inotify.h.
IN_MOVED_TO = 0x80
EVENTS_BYTES = 1 << 16


class FolderWatch:
    """Watches one folder at a time, for one thread; any thread may call `wake`."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        try:
            self._inotify = int(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))  # -1: there are too many
        except AttributeError:  # not Linux
            self._inotify = -1
        self._awake, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._folder = ""
        self._watched = -1  # inotify's number of the folder
        self._has_events = False
        self._was_event = True

    def __del__(self) -> None:
        for file in (self._inotify, self._awake, self._wake):
            if file >= 0:
                os.close(file)

    def watch(self, folder: str) -> None:
        """Watch a folder instead of the one before. To be called before the first look for a file."""
        self._was_event = True
        if folder == self._folder or self._inotify < 0:
            return
        if self._watched >= 0:
            self._libc.inotify_rm_watch(self._inotify, self._watched)
            with suppress(BlockingIOError):
                os.read(self._inotify, EVENTS_BYTES)  # late events, and that of the removal
        self._watched = self._libc.inotify_add_watch(self._inotify, os.fsencode(folder), IN_MOVED_TO)
        self._folder = folder if self._watched >= 0 else ""

    def wait(self, longest_s: float = math.inf) -> None:
        """Wait for an event or for `wake`, but for a limited time."""
        files = [self._awake] if self._watched < 0 else [self._awake, self._inotify]
        ready, _, _ = select.select(files, [], [], min(longest_s, WATCHED_PAUSE_S if self._has_events else PAUSE_S))
        for file in ready:
            os.read(file, EVENTS_BYTES)
        self._was_event = bool(ready)
        self._has_events |= self._inotify in ready

    def found(self) -> None:
        """Note that a file was found: if no event reported it, none may report the next one."""
        self._has_events &= self._was_event

    def wake(self) -> None:
        """End the wait, or the next one."""
        with suppress(BlockingIOError):  # there are many bytes in the pipe
            os.write(self._wake, b"\0")
