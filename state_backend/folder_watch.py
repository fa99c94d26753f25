"""Watches for files that get their names in a folder, as files of a checkpoint and epochs of a log do when complete.

Linux reports such files (inotify). It does not report files that another machine names in a shared folder, and other
systems have no inotify. So whoever watches a folder also looks at it from time to time.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import select
import struct
import time
from collections.abc import Collection
from contextlib import suppress

# The pause between two checks without events. A check takes some 50 us of processor time, mostly to wake the thread.
PAUSE_S = 0.02
# With events: the longest time for which a missing event delays a file (guess).
WATCHED_PAUSE_S = 0.2
# From sys/inotify.h. A file gets its name by a rename or by a hard link; the latter is a creation.
IN_MOVED_TO, IN_CREATE, IN_MOVE_SELF = 0x80, 0x100, 0x800
FOLDER_EVENTS = IN_MOVED_TO | IN_CREATE | IN_MOVE_SELF
IN_Q_OVERFLOW, IN_IGNORED = 0x4000, 0x8000
HEADER = struct.Struct("iIII")  # the folder's number, the kind, a cookie, the length of the name
EVENTS_BYTES = 1 << 16


class FolderEvents:
    """The folders in which files got names, of any number of watched folders; unfinished files (`.name`) do not count.

    For one thread, except for `find`. `fileno` is readable while there are events; -1 where there is no inotify, or too
    many users of it.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.error = ""  # why there is no inotify, where the system has it
        try:
            self._inotify = int(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
            if self._inotify < 0:
                self.error = os.strerror(ctypes.get_errno())
        except AttributeError:  # not Linux
            self._inotify = -1
        self._folders: dict[int, str] = {}  # by inotify's numbers

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """End the watch of all folders."""
        if self._inotify >= 0:
            os.close(self._inotify)
        self._inotify = -1

    def fileno(self) -> int:
        """Return the file descriptor to wait for."""
        return self._inotify

    def find(self, folder: str) -> int:
        """Return the system's number of a folder, for `add`; below 0: the error's number, as the folder may be missing.

        For any thread. The call takes as long as the folder's storage, which may hang.
        """
        if self._inotify < 0:
            return -errno.EBADF
        number = int(self._libc.inotify_add_watch(self._inotify, os.fsencode(folder), FOLDER_EVENTS))
        return number if number >= 0 else -ctypes.get_errno()

    def add(self, folder: str, number: int) -> bool:
        """Report the files of a folder from now on; True if it was not watched before."""
        if number < 0 or self._folders.get(number) == folder:
            return False
        self.remove(folder)  # another folder had this path
        self._folders[number] = folder
        return True

    def remove(self, folder: str) -> None:
        """End the watch of a folder, if it is watched."""
        for number in [each for each, watched in self._folders.items() if watched == folder]:
            self._libc.inotify_rm_watch(self._inotify, number)
            del self._folders[number]

    def read(self) -> Collection[str]:
        """Return the watched folders in which a file got its name since the last call."""
        found: set[str] = set()
        with suppress(BlockingIOError):
            while events := os.read(self._inotify, EVENTS_BYTES):
                start = 0
                while start < len(events):
                    number, kind, _, length = HEADER.unpack_from(events, start)
                    start += HEADER.size + length
                    name = events[start - length : start]
                    if kind & IN_Q_OVERFLOW:  # some events were lost
                        return list(self._folders.values())
                    if kind & IN_MOVE_SELF:
                        self._libc.inotify_rm_watch(self._inotify, number)
                    if kind & (IN_MOVE_SELF | IN_IGNORED):
                        self._folders.pop(number, None)
                    elif number in self._folders and not name.startswith(b"."):
                        found.add(self._folders[number])
        return found


class FolderWatch:
    """Waits for files in one folder at a time, for one thread; any thread may call `wake`.

    Waits are short until the first event has come, and longer from then on. A file that was found without an event
    makes them short again.
    """

    def __init__(self) -> None:
        self._events = FolderEvents()
        self._awake, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._folder = ""
        self._has_events = False
        self._was_event = True

    def __del__(self) -> None:
        for file in (self._awake, self._wake):
            os.close(file)

    def watch(self, folder: str) -> None:
        """Watch a folder instead of the one before. To be called before the first look for a file."""
        self._was_event = True
        if folder == self._folder:
            self._events.add(folder, self._events.find(folder))  # the folder may have been missing
            return
        self._events.remove(self._folder)
        self._events.add(folder, self._events.find(folder))
        self._folder = folder

    def wait(self, longest_s: float = math.inf) -> None:
        """Wait for an event or for `wake`, but for a limited time."""
        inotify = self._events.fileno()
        files = [self._awake] if inotify < 0 else [self._awake, inotify]
        ends_s = time.monotonic() + min(longest_s, WATCHED_PAUSE_S if self._has_events else PAUSE_S)
        while True:
            ready, _, _ = select.select(files, [], [], max(0.0, ends_s - time.monotonic()))
            has_named = inotify in ready and self._folder in self._events.read()
            if self._awake in ready:
                os.read(self._awake, EVENTS_BYTES)
            self._was_event = has_named or self._awake in ready
            self._has_events |= has_named
            if self._was_event or not ready:
                return

    def found(self) -> None:
        """Note that a file was found: if no event reported it, none may report the next one."""
        self._has_events &= self._was_event

    def wake(self) -> None:
        """End the wait, or the next one."""
        with suppress(BlockingIOError):  # there are many bytes in the pipe
            os.write(self._wake, b"\0")
