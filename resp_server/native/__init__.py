"""Compiled modules: the fast path for reads (`fast_path.pyx`), and clients' sockets on epoll (`sockets.pyx`, Linux).

A request goes from `fast_path.pyx` to `core.pyx`, which cuts it; `lookup_batch.pyx` looks its keys up, and one of the
files of replies (`key_replies.pxd` and others) writes the reply. `rows.pyx` has the commands. `keyless_commands.pyx`
calls the functions of commands that the core does not answer. `pipelines.pyx` has what a proxy's connections to servers
do with each request.

They are optional: if they are not built, or SPARKIS_PURE is set, the general path in Python answers everything. CORE
is "compiled" or "python". A proxy's fast path is `resp_server.backends.servers.native`.
"""

from __future__ import annotations

from state_backend.native import compiled_module

fast_path = compiled_module("resp_server.native.fast_path")  # it imports all those that it needs
client_fields, core, encoding, keyless_commands, permissions, pipelines, rows, sockets = (
    None if fast_path is None else compiled_module(f"resp_server.native.{name}")
    for name in ("client_fields", "core", "encoding", "keyless_commands", "permissions", "pipelines", "rows", "sockets")
)
CORE = "python" if core is None else "compiled"
