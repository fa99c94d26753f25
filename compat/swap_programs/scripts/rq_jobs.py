"""The jobs of rq_checks, which a worker imports."""

from __future__ import annotations

from pathlib import Path


def add(one: int, other: int) -> int:
    """Return a sum."""
    return one + other


def fail() -> None:
    """Fail."""
    raise ValueError("as told")


def fail_once(path: str) -> str:
    """Fail the first time."""
    if not Path(path).exists():
        Path(path).touch()
        raise ValueError("the first time")
    return "the second time"
