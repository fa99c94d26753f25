"""Commands that are not served, but for which clients expect one exact error."""

from __future__ import annotations

from resp_server.command.table import Refusal
from resp_server.protocol.errors import NoScriptError, PlainError, cluster_disabled


def _wait() -> PlainError:
    return PlainError(
        "WAIT cannot be used with replica instances. Please also note that since Redis 4.0 if a replica is configured "
        "to be writable (which is not the default) writes to replicas are just local and are not propagated."
    )


def _waitaof() -> PlainError:
    return PlainError(
        "WAITAOF cannot be used with replica instances. Please also note that writes to replicas are just local and "
        "are not propagated."
    )


def _debug() -> PlainError:
    return PlainError(
        'DEBUG command not allowed. If the enable-debug-command option is set to "local", you can run it from a local '
        "connection, otherwise you need to set this option in the configuration file, and then restart the server."
    )


# A container's name covers all its subcommands.
REFUSALS: dict[str, Refusal] = {
    "cluster": cluster_disabled,
    "debug": _debug,
    "evalsha": NoScriptError,
    "evalsha_ro": NoScriptError,
    "wait": _wait,
    "waitaof": _waitaof,
}
