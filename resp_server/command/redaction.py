"""Removes the passwords of requests that a log shows."""

from __future__ import annotations

from collections.abc import Sequence

from resp_server.command.policy import Redaction

REDACTED = b"(redacted)"
# The settings of Redis whose values are secret.
SECRET_SETTINGS = (b"masterauth", b"masteruser", b"requirepass", b"tls-client-key-file-pass", b"tls-key-file-pass")


def redacted(redaction: Redaction, arguments: Sequence[bytes]) -> Sequence[bytes]:
    """Return a request with its passwords redacted."""
    match redaction:
        case Redaction.ALL:
            return [arguments[0], *[REDACTED] * (len(arguments) - 1)]
        case Redaction.ALL_OF_SUBCOMMAND:
            return [*arguments[:2], *[REDACTED] * (len(arguments) - 2)]
        case Redaction.CREDENTIALS:
            return _without_credentials(arguments)
        case Redaction.SETTINGS:
            redacted_arguments = list(arguments)
            for index in range(2, len(arguments) - 1, 2):
                if arguments[index].lower() in SECRET_SETTINGS:
                    redacted_arguments[index + 1] = REDACTED
            return redacted_arguments
    return arguments


def _without_credentials(arguments: Sequence[bytes]) -> Sequence[bytes]:
    """Redact the user and the password after AUTH or AUTH2."""
    redacted_arguments = list(arguments)
    for index, argument in enumerate(arguments):
        if argument.upper() in (b"AUTH", b"AUTH2"):
            for secret in range(index + 1, min(index + 3, len(arguments))):
                redacted_arguments[secret] = REDACTED
    return redacted_arguments
