"""How tests and comparisons wait: look until what is found is enough. No outcome depends on the time taken.

What is waited for happens on a machine that may run thirty other things, so the limit is far beyond every expectation:
it ends a hang, and asserts no speed. A process that ended will never do what it is waited for, so waiting for it ends
at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from time import monotonic, sleep
from typing import Protocol, TypeVar

Found = TypeVar("Found")

WAIT_S_MAX = 300.0
LOOK_EVERY_S = 0.02


class Runs(Protocol):
    """A process that is waited for, such as a Popen."""

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""


def eventually(
    find: Callable[[], Found],
    is_enough: Callable[[Found], object] = bool,
    what: str = "",
    *,
    runs: Iterable[Runs] = (),
) -> Found:
    """Return what is found as soon as it is enough; AssertionError with what was found last.

    `what` says what is waited for. The processes in `runs` must go on: when one ends, this fails at once.
    """
    ends_s = monotonic() + WAIT_S_MAX
    while not is_enough(found := find()):
        _go_on(ends_s, what, found, runs)
        sleep(LOOK_EVERY_S)
    return found


async def eventually_async(
    find: Callable[[], Found], is_enough: Callable[[Found], object] = bool, what: str = ""
) -> Found:
    """Do the same on an event loop, which goes on meanwhile."""
    ends_s = monotonic() + WAIT_S_MAX
    while not is_enough(found := find()):
        _go_on(ends_s, what, found, ())
        await asyncio.sleep(LOOK_EVERY_S)
    return found


def _go_on(ends_s: float, what: str, found: object, runs: Iterable[Runs]) -> None:
    """Fail where nothing more will come."""
    prefix = f"{what}: " if what else ""
    for process in runs:
        code = process.poll()
        assert code is None, f"{prefix}{process!r} ended with exit code {code}; found so far: {found!r}"
    assert monotonic() < ends_s, f"{prefix}still {found!r} after {WAIT_S_MAX:.0f} s"
