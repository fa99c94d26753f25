"""The types of `change_records.pyx`, which has the docstrings."""

from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]

def positions(offsets: Numbers, content: Bytes, prefix_bytes: int) -> bytes: ...
def packed_maps(
    heads: list[bytes], columns: list[tuple[Numbers, Bytes, npt.NDArray[Any] | None]], rows: int
) -> tuple[bytes, bytes, bytes]: ...
