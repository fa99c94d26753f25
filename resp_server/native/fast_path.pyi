"""The types of `fast_path.pyx`, which has the docstrings."""

from collections.abc import Callable
from typing import Any

from resp_server.native.permissions import Permissions
from resp_server.protocol.request_parser import Request

class FastPath:
    command_caller: Any
    needs_turn: bool

    @property
    def is_full(self) -> bool: ...
    @property
    def is_incomplete(self) -> bool: ...
    def __init__(
        self,
        server: Any,
        make_permissions: Callable[[Any], Permissions],
        record_slow: Callable[[Any, bytes, int], None],
        count_keys: Callable[[Any, Any], int | None],
        watch_point: Callable[[str], tuple[str, int]],
    ) -> None: ...
    def take_incomplete(self) -> Any: ...
    def answer(self, session: Any, data: bytes) -> tuple[bytes, list[Request], bytes]: ...
