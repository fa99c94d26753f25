"""The numbers of distinct keys, in the order in which they come."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from state_backend.checkpoint.records import Numbers
from state_backend.native import state_files


class KeyNumbers:
    """A dictionary of keys. The compiled core's takes less memory: the keys, and 32 to 64 bytes for each."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def added(self, content: bytes, starts: Numbers, sizes: Numbers) -> bytes:
        """Return the number of each key, as i64; a new key gets the next number."""
        numbers = self._numbers
        keys = (content[at : at + size] for at, size in zip(starts.tolist(), sizes.tolist(), strict=True))
        return array("q", (numbers.setdefault(key, len(numbers)) for key in keys)).tobytes()

    def found(self, content: bytes, starts: Numbers, sizes: Numbers) -> bytes:
        """Return the number of each key, as i64; -1 for an unknown key."""
        keys = (content[at : at + size] for at, size in zip(starts.tolist(), sizes.tolist(), strict=True))
        return array("q", (self._numbers.get(key, -1) for key in keys)).tobytes()


key_numbers: Callable[[], KeyNumbers] = KeyNumbers if state_files is None else state_files.KeyNumbers
