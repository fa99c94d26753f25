"""The interface of a session's user: `resp_server.acl.rules.User`, which is above the sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Account(Protocol):
    """A session's user (see `resp_server.acl.rules.User`). All of its fields but the name may change at any time.

    is_open: no password is needed. is_unrestricted: no request has to be checked.

    Args:
        rate_limiter: None without a limit.
        compiled: The rules in the form of the compiled core.
    """

    name: bytes
    rate_limiter: Any
    compiled: Any

    @property
    def is_open(self) -> bool: ...
    @property
    def is_unrestricted(self) -> bool: ...
    @property
    def reads_all_keys(self) -> bool: ...
    @property
    def read_patterns(self) -> Sequence[bytes]: ...
    def can_read(self, key: bytes) -> bool:
        """Return whether the user may read a key."""

    def can_subscribe(self, channel: bytes, *, is_pattern: bool = False) -> bool:
        """Return whether the user may subscribe to a channel, or to a pattern."""

    def denial(self, command: Any, request: Sequence[bytes]) -> Any:
        """Return why a request is denied, or None."""
