"""What is known of a command by its name as a client types it, such as GET, get and Get."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

# Remembered spellings of names (guess).
SPELLINGS_MAX = 1024

Known = TypeVar("Known")


class BySpelling(dict[bytes | None, Known]):
    """A cache of look-ups by the name as typed: the first ones are remembered. The key None is free for other uses.

    Args:
        find: Called with a spelling that is not remembered.
    """

    def __init__(self, find: Callable[[bytes], Known]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, spelling: bytes) -> Known:
        found = self._find(spelling)
        if len(self) < SPELLINGS_MAX:
            self[spelling] = found
        return found
