"""Compiled modules: the fast path for reads (`core.pyx`), and clients' sockets on epoll (`sockets.pyx`, Linux).

`pipelines.pyx` has what a proxy's connections to servers do with each request.

They are optional: if they are not built, or SPARKIS_PURE is set, the general path in Python answers everything. CORE
is "compiled" or "python". A proxy's fast path is `resp_server.backends.servers.forwarder`.
"""

from __future__ import annotations

from state_backend.native import compiled_module

core = compiled_module("resp_server.native.core")
pipelines = None if core is None else compiled_module("resp_server.native.pipelines")
sockets = None if core is None else compiled_module("resp_server.native.sockets")
CORE = "python" if core is None else "compiled"
