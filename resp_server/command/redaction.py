"""Removes the passwords of requests that a log shows."""

from __future__ import annotations

from collections.abc import Sequence

from resp_server.command.policy import Redaction

REDACTED = b"(redacted)"
# The settings of Redis whose values are secret.
SECRET_SETTINGS = (b"masterauth", b"masteruser", b"requirepass", b"tls-client-key-file-pass", b"tls-key-file-pass")


def redacted(redaction: Redaction, words: Sequence[bytes]) -> Sequence[bytes]:
    """Return a request with its passwords redacted."""
    match redaction:
        case Redaction.ALL:
            return [words[0], *[REDACTED] * (len(words) - 1)]
        case Redaction.ALL_OF_SUBCOMMAND:
            return [*words[:2], *[REDACTED] * (len(words) - 2)]
        case Redaction.CREDENTIALS:
            return _without_credentials(words)
        case Redaction.SETTINGS:
            redacted_words = list(words)
            for at in range(2, len(words) - 1, 2):
                if words[at].lower() in SECRET_SETTINGS:
                    redacted_words[at + 1] = REDACTED
            return redacted_words
    return words


def _without_credentials(words: Sequence[bytes]) -> Sequence[bytes]:
    """Redact the user and the password after AUTH or AUTH2."""
    redacted_words = list(words)
    for at, word in enumerate(words):
        if word.upper() in (b"AUTH", b"AUTH2"):
            for secret in range(at + 1, min(at + 3, len(words))):
                redacted_words[secret] = REDACTED
    return redacted_words
