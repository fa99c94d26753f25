"""What became of a request at a backend."""

from __future__ import annotations

from enum import Enum, auto


class RequestOutcome(Enum):
    """Whether a backend answers a request. If it does not, nothing was sent, and this process replies."""

    ANSWERED = auto()  # the reply is in the batch, or comes later
    TRANSACTION = auto()  # it is queued after MULTI, or is MULTI, EXEC, DISCARD, WATCH or UNWATCH
    LOCAL = auto()  # its command is about this process
    NO_KEYS = auto()  # the selected database is empty
    REFUSED = auto()  # its form, or what the client may do: the reply is an error
