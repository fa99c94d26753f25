"""Giving freed memory back to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def _malloc_trim() -> Callable[[int], Any]:
    try:
        trim: Callable[[int], Any] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # not glibc
        return lambda pad_bytes: 0
    return trim


def give_back() -> None:
    """Have the C library give back the pages that it holds and nobody uses; where it has no call for that, nothing.

    LMDB takes every page that a transaction writes from malloc. glibc keeps what is freed for later: after an epoch of
    4 million changes 430 of the process's 490 MiB (measured). The call takes 5 ms for them.
    """
    _malloc_trim()(0)
