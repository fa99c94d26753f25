"""Polling: how tests, comparisons and benchmarks wait for a condition. No result depends on the time that it takes.

The machine may be busy, so the default timeout is much longer than any wait: it ends a hang, and asserts no speed. A
wait for a process fails as soon as the process has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from time import monotonic, sleep
from typing import Protocol, TypeVar

Found = TypeVar("Found")

WAIT_S_MAX = 300.0
POLL_INTERVAL_S = 0.02
# A client that reads all the time pauses for this long after each read: what it watches needs the processors, too.
READ_PAUSE_S = 0.002


class RunningProcess(Protocol):
    """A process, such as a Popen."""

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""


def eventually(
    find: Callable[[], Found],
    is_enough: Callable[[Found], object] = bool,
    awaited: str | Callable[[], str] = "",
    *,
    processes: Iterable[RunningProcess] = (),
    timeout_s: float = WAIT_S_MAX,
    interval_s: float = POLL_INTERVAL_S,
    error: type[Exception] = AssertionError,
) -> Found:
    """Call `find` until its result is enough, and return it; `error`, with the last result, after `timeout_s`.

    awaited: the condition, for the error's text; a function is called only for the error, e.g. for a server's log.
    processes: fail at once when one of them ends.
    """
    ends_s = monotonic() + timeout_s
    while not is_enough(found := find()):
        _check_processes(awaited, found, processes, error)
        if monotonic() >= ends_s:
            raise error(_timeout_text(awaited, found, timeout_s))
        sleep(interval_s)
    return found


async def eventually_async(
    find: Callable[[], Found],
    is_enough: Callable[[Found], object] = bool,
    awaited: str | Callable[[], str] = "",
    *,
    timeout_s: float = WAIT_S_MAX,
    interval_s: float = POLL_INTERVAL_S,
    error: type[Exception] = AssertionError,
) -> Found:
    """Do the same as `eventually` on an event loop, which runs meanwhile; times are those of the loop's clock."""
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + timeout_s
    while not is_enough(found := find()):
        if loop.time() >= ends_s:
            raise error(_timeout_text(awaited, found, timeout_s))
        await asyncio.sleep(interval_s)
    return found


def _check_processes(
    awaited: str | Callable[[], str], found: object, processes: Iterable[RunningProcess], error: type[Exception]
) -> None:
    for process in processes:
        code = process.poll()
        if code is not None:
            raise error(f"{_prefix(awaited)}{process!r} ended with exit code {code}; found so far: {found!r}")


def _timeout_text(awaited: str | Callable[[], str], found: object, timeout_s: float) -> str:
    return f"{_prefix(awaited)}still {found!r} after {timeout_s:g} s"


def _prefix(awaited: str | Callable[[], str]) -> str:
    text = awaited() if callable(awaited) else awaited
    return f"{text}: " if text else ""
