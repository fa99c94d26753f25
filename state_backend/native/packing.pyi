"""The types of `packing.pyx`, which has the docstrings."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from state_backend.native.lookup import Pages

class Packing:
    left: list[bytearray]
    new: dict[int, list[bytes]]
    def __init__(
        self,
        runs: list[pa.RecordBatch],
        order: npt.NDArray[np.int64],
        numbers: list[npt.NDArray[np.int32]],
        pages: Pages | None,
        get: Callable[[bytes], bytes | None],
        value_bytes_max: int,
        keeps_each: bool,
    ) -> None: ...
    def take(self, rows_max: int) -> list[tuple[bytes, bytes]] | None: ...
