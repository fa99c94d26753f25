"""The types of `permissions.pyx`, which has the docstrings."""

from collections.abc import Sequence

class Permissions:
    def __init__(self, selectors: Sequence[tuple[Sequence[bytes], Sequence[bytes] | None]]) -> None: ...

def glob_matches(pattern: bytes, text: bytes) -> bool: ...
