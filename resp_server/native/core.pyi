"""The types of `core.pyx`, which has the docstrings."""

from collections.abc import Callable, Sequence
from typing import Any

from resp_server.execution.context import ServerContext
from resp_server.protocol.request_parser import Request
from resp_server.session.session import Session

NAMES: Sequence[tuple[bytes, int, int]]

class Rules:
    def __init__(self, selectors: Sequence[tuple[Sequence[bytes], Sequence[bytes] | None]]) -> None: ...

class InputInterceptor: ...

class FastPath:
    @property
    def is_full(self) -> bool: ...
    @property
    def is_incomplete(self) -> bool: ...
    def __init__(
        self, server: ServerContext, rules_of: Callable[[Any], Rules], note_slow: Callable[[Session, bytes, int], None]
    ) -> None: ...
    def answer(self, session: Session, data: bytes) -> tuple[bytes, list[Request], bytes]: ...

def past_items(data: bytes, at: int, missing: int) -> tuple[int, int]: ...
def glob_matches(pattern: bytes, text: bytes) -> bool: ...
