"""Work in steps, done in one call."""

from __future__ import annotations

from collections.abc import Generator

from resp_server.raw_replies.raw_reply import Result, Steps


def result_of(found: Result | Steps[Result]) -> Result:
    """Do all steps and return the result."""
    if not isinstance(found, Generator):
        return found
    while True:
        try:
            next(found)
        except StopIteration as end:
            result: Result = end.value
            return result
