"""A clock that tests put forward by hand."""

from __future__ import annotations


class ManualClock:
    """Stands for a function that returns the time in seconds."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s
