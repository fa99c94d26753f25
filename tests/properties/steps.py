"""Work in steps, done at once."""

from __future__ import annotations

from collections.abc import Generator

from resp_server.proxy.raw_replies import Result, Steps


def result_of(found: Result | Steps[Result]) -> Result:
    """Do all steps, and return what comes of them."""
    if not isinstance(found, Generator):
        return found
    while True:
        try:
            next(found)
        except StopIteration as end:
            result: Result = end.value
            return result
