"""The compiled part of the server: parsing and replies (`core.pyx`), clients' sockets (`sockets.pyx`, Linux).

A proxy's is `hop.pyx` (see `router.compiled`).

Optional: where it is not built, or SPARKIS_PURE is set, the general path answers everything. CORE says which it is.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType


def built(name: str) -> ModuleType | None:
    """Return a compiled module, if it is there and wanted."""
    try:
        return None if os.environ.get("SPARKIS_PURE") else import_module(name)
    except ImportError:
        return None


core = built("resp_server.native.core")
sockets = None if core is None else built("resp_server.native.sockets")
CORE = "python" if core is None else "compiled"
