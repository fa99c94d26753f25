"""The compiled part of the store. It writes nothing: writes go through py-lmdb alone.

Look-ups in LMDB's pages, many together (`lookup.pyx`); the records of plain values (`packing.pyx`).

Optional: where it is not built, or SPARKIS_PURE is set, `pages_of` returns None: py-lmdb looks everything up, and
records are made in Python.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from state_backend.native.lookup import Pages
    from state_backend.native.packing import Packing

try:
    if os.environ.get("SPARKIS_PURE"):
        raise ImportError
    from state_backend.native import lookup as _lookup
    from state_backend.native import packing as _packing
except ImportError:
    _lookup = _packing = None  # type: ignore[assignment]


def pages_of(environment: Any, file: int) -> Pages | None:
    """Return the pages of an open environment of py-lmdb, whose data file is open as `file`; None without the core."""
    return None if _lookup is None else _lookup.Pages(environment, file)


def packing_of(*given: Any) -> Packing:
    """Return the packing of some runs, for whom `pages_of` returned pages; see `packing.Packing`."""
    return _packing.Packing(*given)
