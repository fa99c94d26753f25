"""What the system knows of processes: processor time, memory, children. Linux only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Memory:
    """Memory of a process. resident = anonymous + mapped; proportional: pages of several processes shared out.

    anonymous is what belongs to no file: the heap. What the system calls private is no measure of it: a mapped page of
    a file is that too while no other process has looked at it.
    """

    resident_bytes: int
    proportional_bytes: int
    anonymous_bytes: int

    @property
    def mapped_bytes(self) -> int:
        """What it has in memory of files: the store, libraries."""
        return self.resident_bytes - self.anonymous_bytes


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used, its threads included."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / CLOCK_TICKS_PER_S


def memory(pid: int) -> Memory:
    """Return the memory that a process has now. Maps are walked for it: it takes milliseconds of the process's time."""
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
    """Tell whether a process applies a job's log."""
    return "state_backend.apply.applier" in command_of(pid)


def serving(server: int) -> list[int]:
    """Return a sparkis server and its workers."""
    return [server, *(pid for pid in below(server) if "resp_server" in command_of(pid))]


def disk_bytes(folder: Path) -> int:
    """Return the room that the files below a folder take on the disk: holes count nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:  # removed meanwhile
            continue
    return total
