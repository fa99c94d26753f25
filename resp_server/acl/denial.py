"""Why a user may not run a request, and Redis' texts of it. Pure."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Reason(IntEnum):
    """Why a request is denied, in Redis' order: the highest reason of all selectors is reported."""

    COMMAND = 1
    KEY = 2
    AUTH = 3
    CHANNEL = 4


class Denial(NamedTuple):
    """The reason of a denial, and the position of the denied word in the request; 0 is the command."""

    reason: Reason
    position: int


def denial_text(reason: Reason, user: bytes, command: str, denied: bytes | None = None) -> str:
    """Return Redis' text of a denial; with `denied`, the text of ACL DRYRUN, which names the key or channel."""
    name = user.decode("utf-8", "surrogateescape")
    if reason is Reason.COMMAND:
        return f"User {name} has no permissions to run the '{command}' command"
    kind = "key" if reason is Reason.KEY else "channel"
    if denied is None:
        return f"No permissions to access a {kind}"
    return f"User {name} has no permissions to access the '{denied.decode('utf-8', 'surrogateescape')}' {kind}"


# The error within EXEC's reply for a queued command that the user may not run any more.
EXEC_DENIAL = (
    "ACLs rules changed between the moment the transaction was accumulated and the EXEC call. This command is no "
    "longer allowed for the following reason: {}"
)
EXEC_DENIAL_REASONS = {
    Reason.COMMAND: "no permission to execute the command or subcommand",
    Reason.KEY: "no permission to touch the specified keys",
    Reason.CHANNEL: "no permission to access one of the channels used as arguments to the command",
}
