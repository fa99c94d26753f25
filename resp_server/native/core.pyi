"""The types of `core.pyx`, which has the docstrings."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from resp_server.protocol.request_parser import Request

NAMES: Sequence[tuple[bytes, int, int]]

class FastPathHost(Protocol):
    """The server whose requests the core answers (`execution.context.ServerContext`)."""

    is_loading: bool
    cluster: Any
    stats: Any
    view: Any
    tracking: Any
    slow_ns: int
    change_counter: int

    def report(self, error: Exception) -> object: ...
    def pending_invalidations(self, session: Any, *, is_within: bool = False) -> bytes: ...
    def pending_pushes(self, epoch_feed: Any) -> bytes: ...

class Rules:
    def __init__(self, selectors: Sequence[tuple[Sequence[bytes], Sequence[bytes] | None]]) -> None: ...

class InputInterceptor: ...

class FastPath:
    @property
    def is_full(self) -> bool: ...
    @property
    def is_incomplete(self) -> bool: ...
    def __init__(
        self, server: FastPathHost, make_rules: Callable[[Any], Rules], record_slow: Callable[[Any, bytes, int], None]
    ) -> None: ...
    def answer(self, session: Any, data: bytes) -> tuple[bytes, list[Request], bytes]: ...

def past_items(data: bytes, at: int, missing: int) -> tuple[int, int]: ...
def glob_matches(pattern: bytes, text: bytes) -> bool: ...
