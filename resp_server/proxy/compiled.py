"""The compiled hop of a proxy, where it is built; without it the general path asks for everything."""

from __future__ import annotations

from state_backend.native import built

hop = built("resp_server.native.hop")
Run = None if hop is None else hop.Run
Asker = None if hop is None else hop.Asker
