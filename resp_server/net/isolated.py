"""A decorator for methods of connections: an exception closes only its own connection, and never reaches the caller."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar


class Breakable(Protocol):
    """A connection that can be closed because of an exception."""

    def close_on_error(self, error: Exception) -> None:
        """Close the connection because of an exception outside of a request. Never raises."""


ConnectionT = TypeVar("ConnectionT", bound=Breakable)
Arguments = ParamSpec("Arguments")


def isolated(
    method: Callable[Concatenate[ConnectionT, Arguments], None],
) -> Callable[Concatenate[ConnectionT, Arguments], None]:
    """Decorate a connection's method: an exception closes this connection only."""

    @wraps(method)
    def run(self: ConnectionT, /, *arguments: Arguments.args, **named: Arguments.kwargs) -> None:
        try:
            method(self, *arguments, **named)
        except Exception as error:
            self.close_on_error(error)

    return run
