"""Counts the bytes of each state while a snapshot is written: of keys, fields, members, scores and values.

A key counts once, however many rows it has. A value counts as the snapshot has it: a small map, list or set is packed,
with some bytes for each item; a value that is kept by an order has its order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

# An applier imports this module, and writes no snapshots: it starts sooner without NumPy and Arrow's functions.
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa


class StateBytes:
    """The bytes of each state in all counted runs and added counts."""

    def __init__(self) -> None:
        self._counts: Counter[str] | None = Counter()
        self._last_key = b""

    @property
    def counts(self) -> Mapping[str, int] | None:
        """The bytes by state; None if counts of None were added."""
        return self._counts

    def add(self, counts: Mapping[str, int] | None) -> None:
        """Add the bytes of other runs. None: an older version wrote these runs, and did not count."""
        if self._counts is None or counts is None:
            self._counts = None
        else:
            self._counts.update(counts)

    def counted(self, runs: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Iterate over runs, and count them. The rows of a key are contiguous, also from one run to the next."""
        for run in runs:
            self.add(self._bytes_in(run))
            yield run

    def _bytes_in(self, run: pa.RecordBatch) -> dict[str, int]:
        import numpy as np
        import pyarrow.compute as pc

        keys, state = run.column("key"), run.column("state")
        key_bytes = _lengths(keys)
        key_bytes[1:][pc.equal(keys[1:], keys[:-1]).to_numpy(zero_copy_only=False)] = 0
        if keys[0].as_py() == self._last_key:
            key_bytes[0] = 0
        self._last_key = keys[-1].as_py()
        sizes = key_bytes + _lengths(run.column("field")) + _lengths(run.column("value"))
        by_state = np.bincount(state.indices.to_numpy(), sizes, len(state.dictionary))  # exact below 2**53
        return {name: int(size) for name, size in zip(state.dictionary.to_pylist(), by_state, strict=True) if size}


def _lengths(column: pa.Array) -> npt.NDArray[np.int64]:
    """Return the length of each value of a binary column; 0 for null."""
    import numpy as np
    import pyarrow.compute as pc

    return np.array(pc.fill_null(pc.binary_length(column), 0), np.int64)
