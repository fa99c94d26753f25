"""The interface of a session's user: `resp_server.acl.user.User`, which is above the sessions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class Account(ABC):
    """A session's user (see `resp_server.acl.user.User`). All of its fields but the name may change at any time.

    Attributes:
        is_open: No password is needed.
        is_unrestricted: No request has to be checked.
        rate_limiter: None: there is no limit.
        reads_committed: The user's connections begin with STATE FRESHNESS COMMITTED.
        compiled: The rules in the form of the compiled core.
        was_used: A client has logged in as this user.
    """

    name: bytes
    rate_limiter: Any
    reads_committed: bool
    compiled: Any
    was_used: bool

    @property
    @abstractmethod
    def is_open(self) -> bool: ...
    @property
    @abstractmethod
    def is_unrestricted(self) -> bool: ...
    @property
    @abstractmethod
    def reads_all_keys(self) -> bool: ...
    @property
    @abstractmethod
    def read_patterns(self) -> Sequence[bytes]: ...
    @abstractmethod
    def can_read(self, key: bytes) -> bool:
        """Return whether the user may read a key."""

    @abstractmethod
    def can_subscribe(self, channel: bytes, *, is_pattern: bool = False) -> bool:
        """Return whether the user may subscribe to a channel, or to a pattern."""

    @abstractmethod
    def denial(self, command: Any, request: Sequence[bytes]) -> Any:
        """Return why a request is denied, or None."""
