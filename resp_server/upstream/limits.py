"""The defaults of an upstream's limits, which are also options."""

from __future__ import annotations

# Twice the time for which Redis runs a script before it replies BUSY (the default of `busy-reply-threshold`).
TIMEOUT_S = 10.0
# Shared connections for each protocol version (guess: few, because Redis runs commands on one thread).
CONNECTIONS = 4
# Connections of single clients (guess: a tenth of Redis' default `maxclients`).
PINNED_MAX = 1000
