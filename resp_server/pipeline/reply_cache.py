"""Encoded replies, or parts of them, that are the same until the facts in them change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from resp_server.protocol.replies import Frames, Reply


@dataclass
class ReplyCache:
    """Encoded replies, each with the facts of which it was made.

    Args:
        by_command: Of commands without arguments, by name (see `commands.memory`).
        hello: Parts of the reply to HELLO (see `commands.connection`).
    """

    by_command: dict[str, tuple[tuple[object, ...], Frames]] = field(default_factory=dict)
    hello: dict[tuple[int, bytes, bytes], tuple[Mapping[bytes, Reply], tuple[bytes, bytes]]] = field(
        default_factory=dict
    )
