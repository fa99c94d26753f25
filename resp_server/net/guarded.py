"""What is raised for one connection ends that connection: its methods are called in others' turns, and by timers."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar


class Breakable(Protocol):
    """A connection."""

    def break_off(self, error: Exception) -> None:
        """End it because of an exception that is no request's. It does not raise."""


Its = TypeVar("Its", bound=Breakable)
Arguments = ParamSpec("Arguments")


def alone(method: Callable[Concatenate[Its, Arguments], None]) -> Callable[Concatenate[Its, Arguments], None]:
    """Have what a connection's method raises end this connection alone."""

    @wraps(method)
    def run(self: Its, /, *arguments: Arguments.args, **named: Arguments.kwargs) -> None:
        try:
            method(self, *arguments, **named)
        except Exception as error:
            self.break_off(error)

    return run
