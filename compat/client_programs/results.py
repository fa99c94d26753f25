"""What a client's program found at its places, beside what it found at the real servers."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from compat.client_programs.runs import END
from compat.swap_programs.outcomes import Limit, Outcomes

LIMITS = Path(__file__).parent / "limits.toml"


@dataclass(frozen=True)
class Known:
    """A step's result that the installed redis-server cannot have, and the reason."""

    client: str
    step: str
    result: str
    reason: str


def known_results(path: Path = LIMITS) -> list[Known]:
    """Read the known results."""
    return [Known(**row) for row in tomllib.loads(path.read_text(encoding="utf-8")).get("known", [])]


@dataclass(frozen=True)
class At:
    """The steps at one place. name: that of the place at sparkis."""

    place: str
    name: str
    expected: Outcomes
    found: Outcomes

    @property
    def different(self) -> list[str]:
        """The steps whose results differ, also those that only one server has."""
        steps = dict.fromkeys((*self.expected, *self.found))
        return [step for step in steps if self.expected.get(step) != self.found.get(step)]

    @property
    def same(self) -> int:
        """The number of steps with the same result."""
        return sum(self.found.get(step) == result for step, result in self.expected.items())

    @property
    def proves_nothing(self) -> bool:
        """Whether the program does not work at the real server, so that it may fail at sparkis in the same way.

        A program that cannot connect has one error in all steps, or in all but the first, at both.
        """
        most = max(Counter(self.expected.values()).values(), default=0)
        return END in self.expected or most >= len(self.expected) - 1

    @classmethod
    def of(cls, client: str, place: str, name: str, outcomes: tuple[Outcomes, Outcomes], known: Iterable[Known]) -> At:
        """Compare the steps at the real server, or the results that are known without it, with those at sparkis."""
        expected, found = outcomes
        better = {
            step: each.result
            for each in known
            for step in expected
            if each.client == client and f"{name}: {step}" == each.step
        }
        return cls(place, name, expected | better, found)

    def named(self, step: str) -> str:
        """Return a step's name in limits.toml."""
        return f"{self.name}: {step}"

    def unexplained(self, client: str, limits: Sequence[Limit]) -> list[str]:
        """Return the steps that differ and that no limit covers."""
        return [step for step in self.different if not any(each.covers(client, self.named(step)) for each in limits)]


@dataclass(frozen=True)
class Result:
    """A client's runs at all places."""

    client: str
    runs: Sequence[At]

    def unneeded(self, limits: Iterable[Limit]) -> list[str]:
        """Return the globs of limits that cover no difference any more."""
        different = [at.named(step) for at in self.runs for step in at.different]
        globs = [glob for each in limits if each.program == self.client for glob in each.checks]
        return [glob for glob in globs if not any(fnmatchcase(name, glob) for name in different)]
