"""Limits that several parts of a server share, or that bound its memory in the same way.

`native/sockets.pyx` repeats `PARTIAL_BYTES_MAX`, as compiled code needs it when it is compiled.
"""

from __future__ import annotations

# A step of long work ends after this time, so that other clients have a turn: a fifth of a client's own turn (guess).
# Its last item may exceed it.
STEP_NS_MAX = 1_000_000
# The start of a request, or of a reply, up to this size is parsed again when more of it arrives. More is parsed step by
# step (guess).
PARTIAL_BYTES_MAX = 32 << 10
# The same of a reply that compiled code parses: COMMAND of a Redis with modules (guess).
PARTIAL_REPLY_BYTES_MAX = 256 << 10
# Values or members that are looked up in one step (measured: 256 values take 0.5 ms, 256 members of a set 0.2 ms).
LOOKUPS_PER_STEP = 256

# Requests that are read while their clients leave replies unread; beyond it, such a client is not read. With the
# compiled core it is of all clients, without it of each. (Guess; Redis' limit of one client's query buffer.)
AHEAD_BYTES_MAX = 1 << 30

# The longest wait for subscribers whose output exceeds `output_pause_bytes`, and the interval of looking at it.
SLOW_CLIENT_WAIT_S = 1.0
SLOW_CLIENT_POLL_S = 0.01

# Requests without a reply at one connection to a server of a proxy, or to its upstream; further requests are refused
# with TRYAGAIN (guess: 100 clients with two transactions of 1,000 commands).
SERVER_REQUESTS_MAX = 250_000

# Bytes that wait to be sent. They are guesses: several times what one peer gets in a second under load, and little
# beside the memory of a store.
# Replies of one round. More are sent before its end: a few writes that fill a socket's buffer.
ROUND_REPLIES_BYTES_MAX = 256 << 10
# Requests to one server of a proxy, or to its upstream; further requests are refused with TRYAGAIN.
SERVER_REQUESTS_BYTES_MAX = 64 << 20
# Messages for the other workers of the port, without those on their way; further messages are dropped.
WORKER_MESSAGES_BYTES_MAX = 16 << 20
# Messages for one other node of a cluster; further messages are dropped.
NODE_MESSAGES_BYTES_MAX = 8 << 20
# Lines of MONITOR for the other workers; then monitors there are closed.
MONITOR_LINES_BYTES_MAX = 8 << 20
# Directives and topologies for one peer of a registry, which is disconnected beyond that.
REGISTRY_PEER_BYTES_MAX = 4 << 20

# Drivers at a port for announcements or control, and sometimes their tasks (guess).
DRIVER_CONNECTIONS_MAX = 1024
# The time without traffic before the first TCP keepalive probe, where a peer may send nothing for hours (guess).
KEEPALIVE_S = 60

# The defaults of an upstream's limits, which are also options.
# Twice the time for which Redis runs a script before it replies BUSY (the default of `busy-reply-threshold`).
UPSTREAM_TIMEOUT_S = 10.0
# Shared connections for each protocol version (guess: few, because Redis runs commands on one thread).
UPSTREAM_CONNECTIONS = 4
# Connections of single clients (guess: a tenth of Redis' default `maxclients`).
DEDICATED_CONNECTIONS_MAX = 1000
