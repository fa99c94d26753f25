"""The part of a server's context that only a proxy has, and a server in front of an upstream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from resp_server.protocol.replies import Reply
from resp_server.session.session import Session


class OverlayControl(ABC):
    """Shows and changes the owners of keys at a proxy with an upstream; ReplyError if that is not possible."""

    @abstractmethod
    def owners(self) -> Reply:
        """Return the jobs with their key formats."""

    @abstractmethod
    def owner(self, keys: Sequence[bytes], database: int) -> Reply:
        """Return the owner of each key."""

    @abstractmethod
    def confirm(self, job: bytes) -> Reply:
        """Give a job's keys to its states."""

    @abstractmethod
    def release(self, job: bytes) -> Reply:
        """Give a job's keys to the upstream."""

    @abstractmethod
    def reload(self) -> Reply:
        """Read the rules file again."""

    @abstractmethod
    def shadow(self) -> Reply:
        """Return what comparisons of the upstream with the states have found."""


@dataclass
class ProxyContext:
    """The parts of a proxy that commands use; without one, these defaults.

    Args:
        leave: Ends what belongs to a client at other processes; None: no request goes to another process.
        info_fields: Returns INFO's fields about the state servers; None: this process has the stores.
        overlay_control: The owners of keys; None: there is no upstream.
        hello_fields: Fields of the upstream's reply to HELLO.
        is_single_node: CLUSTER describes this process as the only node.
    """

    leave: Callable[[Session], None] | None = None
    info_fields: Callable[[], Mapping[str, object]] | None = None
    overlay_control: OverlayControl | None = None
    hello_fields: Mapping[bytes, Reply] = field(default_factory=dict)
    is_single_node: bool = False
