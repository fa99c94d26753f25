"""The compiled loops: look-ups in LMDB's pages, records of a store, changes of a log, Spark's state files.

Nothing here writes: all writes go through py-lmdb. Nothing here is needed: without a compiler, or with SPARKIS_PURE
set, `lmdb`, `codec` and `checkpoint` use their own functions in Python.
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

logger = logging.getLogger("sparkis.server")


def compiled_module(name: str) -> ModuleType | None:
    """Return a compiled module; None if it is not built, or SPARKIS_PURE is set."""
    if os.environ.get("SPARKIS_PURE"):
        return None
    try:
        return import_module(name)
    except ImportError as error:
        if not (isinstance(error, ModuleNotFoundError) and error.name == name):
            logger.warning("%s is built but cannot be loaded; the slower Python code is used: %s", name, error)
        return None


_lookup = compiled_module("state_backend.native.lookup")
state_files = compiled_module("state_backend.native.state_files")
change_records = compiled_module("state_backend.native.change_records")
_packing = None if _lookup is None else compiled_module("state_backend.native.packing")


def pages_of(environment: Any, file: int) -> Pages | None:
    """Return the pages of an open environment of py-lmdb; None without the core.

    Args:
        file: Its open data file.
    """
    return None if _lookup is None or _packing is None else _lookup.Pages(environment, file)


def packing_of(*given: Any) -> Packing:
    """Return a `packing.Packing`. To be called only where `pages_of` returns pages."""
    assert _packing is not None
    packing: Packing = _packing.Packing(*given)
    return packing
