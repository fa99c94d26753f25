"""The errors of commands that are not served, but for which clients expect exactly that error."""

from __future__ import annotations

from resp_server.protocol.errors import GenericError


def wait_refused() -> GenericError:
    return GenericError(
        "WAIT cannot be used with replica instances. Please also note that since Redis 4.0 if a replica is configured "
        "to be writable (which is not the default) writes to replicas are just local and are not propagated."
    )


def waitaof_refused() -> GenericError:
    return GenericError(
        "WAITAOF cannot be used with replica instances. Please also note that writes to replicas are just local and "
        "are not propagated."
    )


def debug_refused() -> GenericError:
    return GenericError(
        'DEBUG command not allowed. If the enable-debug-command option is set to "local", you can run it from a local '
        "connection, otherwise you need to set this option in the configuration file, and then restart the server."
    )
