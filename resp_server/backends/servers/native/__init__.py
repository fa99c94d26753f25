"""The compiled forwarder of a proxy, if it is built; without it the general path forwards all requests.

- `key_owners`: which keys are the states', and which the upstream's.
- `forwarded_commands`: the commands that are forwarded, and where their keys are.
- `stored_reads`: answers reads from a state server's stores, before the forwarder gets them.
- `upstream_access`: finds a client's connection to the upstream.
- `forwardable_requests`: parses the forwardable requests at the front of a client's input.
- `forwarder`: sends them to their servers.
- `client_forwarder`: the forwarder's part of one client: its input, its transaction, its replies.
- `client_batch`: the requests of one client that were sent together, and their replies.
- `pipeline_batch`: the requests that go over one connection together.
- `reply_delivery`: sends a client its replies, or has the general path answer.
"""

from __future__ import annotations

from typing import Any

from state_backend.native import compiled_module

forwarder = compiled_module("resp_server.backends.servers.native.forwarder")
stored_reads: Any = compiled_module("resp_server.backends.servers.native.stored_reads")
client_forwarder = compiled_module("resp_server.backends.servers.native.client_forwarder")
