"""The compiled part of the store. It writes nothing: writes go through py-lmdb alone.

Look-ups in LMDB's pages, many together (`lookup.pyx`); the records of plain values (`packing.pyx`).

Optional: where it is not built, or SPARKIS_PURE is set, `pages_of` returns None: py-lmdb looks everything up, and
records are made in Python.
"""

from __future__ import annotations

import logging
import os
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from state_backend.native.lookup import Pages
    from state_backend.native.packing import Packing

logger = logging.getLogger(__name__)


def built(name: str) -> ModuleType | None:
    """Return a compiled module, if it is there and wanted."""
    if os.environ.get("SPARKIS_PURE"):
        return None
    try:
        return import_module(name)
    except ImportError as error:
        if not (isinstance(error, ModuleNotFoundError) and error.name == name):
            logger.warning("%s is built, and cannot be loaded; Python does its work: %s", name, error)
        return None


_lookup = built("state_backend.native.lookup")
_packing = None if _lookup is None else built("state_backend.native.packing")


def pages_of(environment: Any, file: int) -> Pages | None:
    """Return the pages of an open environment of py-lmdb, whose data file is open as `file`; None without the core."""
    return None if _lookup is None or _packing is None else _lookup.Pages(environment, file)


def packing_of(*given: Any) -> Packing:
    """Return the packing of some runs, for whom `pages_of` returned pages; see `packing.Packing`."""
    assert _packing is not None
    packing: Packing = _packing.Packing(*given)
    return packing
