"""The types of `packing.pyx`, which has the docstrings."""

from collections.abc import Callable
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from state_backend.native.lookup import Pages

class Packing:
    skipped: list[bytearray]
    changed: int
    new: dict[tuple[int, int], int]
    keys: list[bytes]
    are_new: list[bool]
    def __init__(
        self,
        runs: list[pa.RecordBatch],
        order: npt.NDArray[np.int64],
        tags: list[npt.NDArray[np.int32]],
        pages: Pages | None,
        get: Callable[[bytes], bytes | None],
        value_bytes_max: int,
        map_bytes_max: int,
        map_fields_max: int,
        takes_whole_keys: bool,
    ) -> None: ...
    def begin(self, rows_max: int, keys_max: int) -> bool: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> tuple[memoryview, memoryview]: ...
