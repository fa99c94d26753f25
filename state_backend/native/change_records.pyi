"""The types of `change_records.pyx`, which has the docstrings."""

from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]

def positions(offsets: Numbers, content: Bytes, prefix_bytes: int) -> bytes: ...
def order_of(positions: npt.NDArray[np.uint64]) -> tuple[bytes, bytes]: ...
def integer_texts(
    numbers: npt.NDArray[np.int64], validity: npt.NDArray[np.uint8] | None = None
) -> tuple[bytes, bytes]: ...
def joined(parts: list[bytes | tuple[Numbers, Bytes]], rows: int) -> tuple[bytes, bytes]: ...
def packed_maps(
    heads: list[bytes], columns: list[tuple[Numbers, Bytes, npt.NDArray[Any] | None]], rows: int
) -> tuple[bytes, bytes, bytes]: ...
