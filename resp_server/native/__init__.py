"""The compiled part of the server: parsing and replies (`core.pyx`), clients' sockets (`sockets.pyx`, Linux).

Optional: where it is not built, or SPARKIS_PURE is set, the general path answers everything. CORE says which it is.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType


def _built(name: str) -> ModuleType | None:
    try:
        return None if os.environ.get("SPARKIS_PURE") else import_module(name)
    except ImportError:
        return None


core = _built("resp_server.native.core")
sockets = None if core is None else _built("resp_server.native.sockets")
CORE = "python" if core is None else "compiled"
