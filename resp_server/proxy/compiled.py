"""The compiled hop of a proxy, if it is built; without it the general path forwards all requests."""

from __future__ import annotations

from state_backend.native import compiled_module

hop = compiled_module("resp_server.proxy.hop")
PipelineBatch = None if hop is None else hop.PipelineBatch
ClientForwarder = None if hop is None else hop.ClientForwarder
