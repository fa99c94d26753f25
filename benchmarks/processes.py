"""Processor time, memory and children of processes, as the system reports them. Linux only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Memory:
    """The memory of a process. resident = anonymous + mapped; proportional: shared pages are divided among processes.

    anonymous memory is the heap; it belongs to no file. It is not the system's "private" memory, which includes mapped
    pages of files that no other process has read.
    """

    resident_bytes: int
    proportional_bytes: int
    anonymous_bytes: int

    @property
    def mapped_bytes(self) -> int:
        """The memory of mapped files: the store, libraries."""
        return self.resident_bytes - self.anonymous_bytes


def cpu_s(pid: int) -> float:
    """Return the processor time of a process, including its threads."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / CLOCK_TICKS_PER_S


def run_ns(pid: int) -> int:
    """Return the processor time of a process's present threads. `cpu_s` has that of all, in steps of 10 ms."""
    found = 0
    for each in os.listdir(f"/proc/{pid}/task"):
        with suppress(OSError):  # it ended meanwhile
            found += int(Path(f"/proc/{pid}/task/{each}/schedstat").read_text().split()[0])
    return found


def memory(pid: int) -> Memory:
    """Return the memory of a process. The system walks its maps, which blocks the process for milliseconds."""
    sizes: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, size = line.split()[:2]
        sizes[name.rstrip(":")] = int(size) << 10
    return Memory(
        resident_bytes=sizes["Rss"],
        proportional_bytes=sizes["Pss"],
        anonymous_bytes=sizes["Anonymous"],
    )


def command_of(pid: int) -> str:
    """Return a process's command line; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def below(parent: int) -> Iterator[int]:
    """Iterate over all descendants of a process."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                words = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended meanwhile
                continue
            children.setdefault(int(words[1]), []).append(int(entry))
    waiting = [parent]
    while waiting:
        found = children.get(waiting.pop(), [])
        yield from found
        waiting += found


def is_applier(pid: int) -> bool:
    """Return whether a process applies a job's log."""
    return "state_backend.apply.applier" in command_of(pid)


def serving(server: int) -> list[int]:
    """Return a sparkis server and its workers."""
    return [server, *(pid for pid in below(server) if "resp_server" in command_of(pid))]


def disk_bytes(folder: Path) -> int:
    """Return the disk space of the files below a folder; holes do not count."""
    total = 0
    # os.walk leaves out folders that are removed meanwhile; Path.rglob raises.
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with suppress(FileNotFoundError):
                total += Path(parent, name).lstat().st_blocks * 512
    return total
