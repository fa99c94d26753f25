"""The compiled part of the store: look-ups in LMDB's pages, many together (`lookup.pyx`). It writes nothing.

Optional: where it is not built, or SPARKIS_PURE is set, `pages_of` returns None and py-lmdb looks everything up.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from state_backend.native.lookup import Pages

try:
    if os.environ.get("SPARKIS_PURE"):
        raise ImportError
    from state_backend.native import lookup as _lookup
except ImportError:
    _lookup = None  # type: ignore[assignment]


def pages_of(environment: Any, file: int) -> Pages | None:
    """Return the pages of an open environment of py-lmdb, whose data file is open as `file`; None without the core."""
    return None if _lookup is None else _lookup.Pages(environment, file)
