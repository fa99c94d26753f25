"""The compiled hop of a proxy, if it is built; without it the general path forwards all requests."""

from __future__ import annotations

from state_backend.native import built

hop = built("resp_server.native.hop")
PipelineBatch = None if hop is None else hop.PipelineBatch
Asker = None if hop is None else hop.Asker
