"""What threads do while a test does something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

from compat.waiting import READ_PAUSE_S

Work = Callable[[Event], object]


@contextmanager
def meanwhile(*works: Work) -> Iterator[None]:
    """Run each in a thread while the block runs; each returns when its event is set. What one raises is raised."""
    is_over = Event()
    with ThreadPoolExecutor(len(works)) as threads:
        running = [threads.submit(work, is_over) for work in works]
        try:
            yield
        finally:
            is_over.set()
    for each in running:
        each.result()


def repeated(action: Callable[[], object], pause_s: float = READ_PAUSE_S) -> Work:
    """Return the work that does something again and again."""

    def work(is_over: Event) -> None:
        while not is_over.wait(pause_s):
            action()

    return work
