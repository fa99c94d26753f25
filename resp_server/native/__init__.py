"""The compiled part of the server: parsing and replies (`core.pyx`), clients' sockets (`sockets.pyx`, Linux).

A proxy's is `hop.pyx` (see `resp_server.proxy.compiled`).

Optional: where it is not built, or SPARKIS_PURE is set, the general path answers everything. CORE says which it is.
"""

from __future__ import annotations

from state_backend.native import built

core = built("resp_server.native.core")
sockets = None if core is None else built("resp_server.native.sockets")
CORE = "python" if core is None else "compiled"
