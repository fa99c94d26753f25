"""The budgets of the benchmark of all commands: how long a request may take, by what its command's row says of it."""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import NamedTuple

from resp_server.command.policy import SpecialCommand
from resp_server.command.table import Command

# The share of the time without tracking that a read of a tracking connection may take.
TRACKING = 1.3
# A complexity that names elements: O(N), O(S+N), O(log(N)+M), and not only O(1) and O(log(N)).
CONSTANT = re.compile(r"O\((1|log\(N\))\)")


class Work(Enum):
    """The work that a request makes."""

    POINT = auto()  # one key, O(1) or O(log n)
    ELEMENTS = auto()  # one key, or several that are read one by one; it returns or walks elements
    OTHER = auto()  # sets of several keys, sorts, searches of places
    OWN = auto()  # the connection's, or the server's
    TRANSACTION = auto()
    INFO_SECTION = auto()
    INFO_ALL = auto()


class Budget(NamedTuple):
    """The largest of these is the limit of a request's time."""

    of_redis: float
    of_twemproxy: float = 0.0
    us: float = 0.0

    def limit_us(self, redis_us: float, twemproxy_us: float | None) -> float:
        """Return the limit."""
        return max(self.of_redis * redis_us, self.of_twemproxy * (twemproxy_us or 0.0), self.us)

    @property
    def text(self) -> str:
        """The budget in words."""
        parts = [f"{self.of_redis:g} x redis"] if self.of_redis else []
        parts += [f"{self.of_twemproxy:g} x twemproxy"] if self.of_twemproxy else []
        parts += [f"{self.us:g} µs"] if self.us else []
        return "≤ " + " or ".join(parts)


AT_A_SERVER = {
    Work.POINT: Budget(1.5),
    Work.ELEMENTS: Budget(1.0),
    Work.OTHER: Budget(3.0),
    Work.OWN: Budget(3.0),
    Work.TRANSACTION: Budget(3.0),
    Work.INFO_SECTION: Budget(20.0, us=100.0),
    Work.INFO_ALL: Budget(0.0, us=500.0),
}
# A proxy's, and those of one address with an upstream.
BEFORE_SERVERS = AT_A_SERVER | {
    Work.POINT: Budget(2.0, 1.5),
    Work.ELEMENTS: Budget(2.0, 1.5),
    Work.OTHER: Budget(3.0, 1.5),
    Work.OWN: Budget(4.0),
    Work.TRANSACTION: Budget(3.0, us=10.0),
}


def budget_of(work: Work, *, is_direct: bool) -> Budget:
    """Return the budget. is_direct: at a server that has the keys itself."""
    return (AT_A_SERVER if is_direct else BEFORE_SERVERS)[work]


def work_of(command: Command, variant: str = "") -> Work:
    """Return the work of a command, from its row."""
    facts = command.facts
    if command.policy.special is SpecialCommand.INFO:
        return Work.INFO_SECTION if variant else Work.INFO_ALL
    if command.policy.special is SpecialCommand.EXEC:
        return Work.TRANSACTION
    if not facts.key_specs or all("not_key" in spec["flags"] for spec in facts.key_specs):
        return Work.OWN
    if not re.search(r"O\(", CONSTANT.sub("", facts.complexity)):
        return Work.POINT
    if command.single_key_at or "|" in command.name:
        return Work.OTHER if facts.group == "geo" else Work.ELEMENTS
    return Work.ELEMENTS if command.policy.split is not None else Work.OTHER
