"""Decides which copies of keys at an upstream may be deleted, by the owners that all proxies report. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from resp_server.backends.routing.key_analysis import printable
from resp_server.backends.routing.rules import Owner, Writes
from state_backend.model.errors import SparkisError

EXAMPLES_MAX = 2


class UnclearOwnerError(SparkisError):
    """The proxies disagree about a key, or no known state has it."""


class ReportedOwner(NamedTuple):
    """The reply of STATE OWNER for a key.

    Args:
        state: `job:state`; empty: no known state has such keys.
    """

    owner: str
    state: str
    writes: str

    @property
    def is_state(self) -> bool:
        """Return whether the states alone answer the key."""
        return self.owner == Owner.STATE.value

    @property
    def is_written(self) -> bool:
        """Return whether writes of the key go to the upstream."""
        return self.writes == Writes.PASS.value


class Copies:
    """Keys of an upstream that states own: `deletable` ones, and those that a program still writes (`written`)."""

    def __init__(self) -> None:
        self.deletable: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self.examples: dict[str, list[bytes]] = {}

    def add(self, key: bytes, owners: Sequence[ReportedOwner]) -> bool:
        """Count a key, with its owner at each proxy; tell whether it may be deleted. UnclearOwnerError."""
        first, *others = owners
        if any(each != first for each in others):
            raise UnclearOwnerError(
                f"the proxies do not agree about the key '{printable(key)}': {', '.join(map(_text, owners))}. Give all "
                "of them the same rules, releases and confirmations"
            )
        if not first.is_state:
            return False
        if not first.state:
            raise UnclearOwnerError(
                f"a rule gives the key '{printable(key)}' to the states, and no state has such keys: correct the rule"
            )
        if first.is_written:
            self.written[first.state] += 1
            return False
        self.deletable[first.state] += 1
        examples = self.examples.setdefault(first.state, [])
        if len(examples) < EXAMPLES_MAX:
            examples.append(key)
        return True


def _text(owner: ReportedOwner) -> str:
    return f"{owner.owner}{f' ({owner.state})' if owner.state else ''}, writes = {owner.writes}"
