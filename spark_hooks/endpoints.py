"""The servers that this driver knows of, and how a sink tells them of a new epoch.

A sink and the servers of its log need not know each other: servers look at the log once a second by themselves. An
endpoint in the same process is told at once, and can be waited for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from state_backend.filesystems import open_filesystem


class Endpoint(ABC):
    """A place where state can be read, as the sink sees it."""

    @abstractmethod
    def notice(self, job: str, epoch: int) -> None:
        """Tell of a committed epoch. Never raises: the servers find it by themselves."""

    @abstractmethod
    def wait(self, job: str, epoch: int, timeout_s: float) -> bool:
        """Return whether the epoch, or a later one, can be read; wait for it that long."""


_endpoints: dict[str, list[Endpoint]] = {}


def _root(log: str) -> str:
    return open_filesystem(log).root


def add(log: str, endpoint: Endpoint) -> None:
    """Make an endpoint known to the sinks of a log."""
    _endpoints.setdefault(_root(log), []).append(endpoint)


def remove(log: str, endpoint: Endpoint) -> None:
    """Forget an endpoint."""
    known = _endpoints.get(_root(log), [])
    if endpoint in known:
        known.remove(endpoint)


def of_log(log: str) -> list[Endpoint]:
    """Return the endpoints that serve a log."""
    return list(_endpoints.get(_root(log), ()))
