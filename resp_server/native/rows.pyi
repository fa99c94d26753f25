"""The types of `rows.pyx`, which has the docstrings."""

from collections.abc import Mapping, Sequence

ROWS: Sequence[tuple[bytes, int, int, int, int, int, bool, *tuple[Mapping[str, int], ...]]]
NAMES: Sequence[bytes]
