"""The types of `core.pyx`, which has the docstrings."""

from collections.abc import Callable, Sequence
from typing import Any

from resp_server.protocol.request_parser import Request

ROWS: Sequence[tuple[bytes, int, int, int, int, int, bool]]
NAMES: Sequence[bytes]

class Rules:
    def __init__(self, selectors: Sequence[tuple[Sequence[bytes], Sequence[bytes] | None]]) -> None: ...

class SessionFields: ...
class ConnectionFields: ...
class InputInterceptor: ...

class CalledCommand:
    def __init__(
        self,
        command: Any,
        command_stats: Any,
        name_words: int,
        least: int,
        most: int,
        takes_words: bool,
        converters: Sequence[Callable[[bytes], Any] | None] | None,
        keeps_caching: bool,
        is_for_subscribers: bool,
        has_slot: bool,
        is_own: Any,
    ) -> None: ...

class FastPath:
    caller: Any
    needs_turn: bool

    @property
    def is_full(self) -> bool: ...
    @property
    def is_incomplete(self) -> bool: ...
    def __init__(
        self,
        server: Any,
        make_rules: Callable[[Any], Rules],
        record_slow: Callable[[Any, bytes, int], None],
        count_keys: Callable[[Any, Any], int | None],
        watch_point: Callable[[str], tuple[str, int]],
    ) -> None: ...
    def take_incomplete(self) -> Any: ...
    def answer(self, session: Any, data: bytes) -> tuple[bytes, list[Request], bytes]: ...

def untrack(words: list[Any]) -> None: ...
def past_items(data: bytes, at: int, missing: int) -> tuple[int, int]: ...
def glob_matches(pattern: bytes, text: bytes) -> bool: ...
