"""The types of `lookup.pyx`, which has the docstrings."""

from collections.abc import Iterable, Sequence
from typing import Any

import lmdb

class Pages:
    is_readable: bool
    def __init__(self, env: lmdb.Environment, file: int) -> None: ...
    def populate(self, bytes_max: int) -> int: ...
    def learn(self, txn: lmdb.Transaction[Any]) -> bool: ...
    def scan(
        self,
        ranges: Iterable[tuple[int, int]],
        count: int,
        visits_max: int,
        bytes_max: int,
        now_ms: int,
        forms: int,
        expire: bool,
    ) -> tuple[int, list[bytes]] | None: ...

def hashes(key: bytes) -> tuple[int, int, int]: ...
def look_up(pages: Pages, table: str, names: Sequence[bytes], moment_ms: int = 0) -> list[bytes | None]: ...
def look_up_block(pages: Pages, name: bytes, moment_ms: int) -> bytes | None: ...
def is_newest(pages: Pages) -> bool: ...
