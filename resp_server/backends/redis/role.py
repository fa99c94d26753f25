"""Whether a server that is reached at an upstream's address is still a master. Pure."""

from __future__ import annotations

MASTER = b"master\r\n"
SLAVE = b"slave\r\n"


class RoleCheck:
    """Refuses a replica at the address of a master: its data may be old, and it takes no writes.

    Args:
        must_be_master: A replica is refused from the start; else only after a master was there.
    """

    def __init__(self, *, must_be_master: bool = False) -> None:
        self._must_be_master = must_be_master

    @property
    def must_be_master(self) -> bool:
        """Whether a replica is refused now."""
        return self._must_be_master

    def refusal(self, name: bytes, reply: bytes) -> str:
        """Return why the server with this reply to ROLE is refused; empty: it is not."""
        if name != b"ROLE" or reply[:1] != b"*":
            return ""
        _, _, after = reply.partition(b"\r\n")
        _, _, kind = after.partition(b"\r\n")
        if kind.startswith(MASTER):
            self._must_be_master = True
        elif kind.startswith(SLAVE) and self._must_be_master:
            return "it is a replica now, not the master"
        return ""


class AnyRole(RoleCheck):
    """Accepts any role: the nodes of a Redis Cluster say themselves which slots they have."""

    def refusal(self, name: bytes, reply: bytes) -> str:
        return ""
