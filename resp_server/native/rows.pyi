"""The types of `rows.pyx`, which has the docstrings."""

from collections.abc import Sequence

ROWS: Sequence[tuple[bytes, int, int, int, int, int, bool]]
NAMES: Sequence[bytes]
