"""The compiled forwarder of a proxy, if it is built; without it the general path forwards all requests."""

from __future__ import annotations

from state_backend.native import compiled_module

forwarder = compiled_module("resp_server.backends.servers.forwarder")
ClientForwarder = None if forwarder is None else forwarder.ClientForwarder
