"""The types of `keyless_commands.pyx`, which has the docstrings."""

from collections.abc import Callable, Sequence
from typing import Any

class KeylessCommand:
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
        is_local: Any,
        is_connected: Any,
    ) -> None: ...
