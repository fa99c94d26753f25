"""What the checks of a program found at both addresses, and the differences that are intended."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

LIMITS = Path(__file__).parent / "limits.toml"

# The outcome of each check, by the check's name: any JSON value.
Outcomes = dict[str, Any]
# The outcomes of a suite's test.
PASSED, FAILED = "passed", "failed"


@dataclass(frozen=True)
class Limit:
    """An intended difference: checks of a program, as globs, and the reason."""

    program: str
    checks: tuple[str, ...]
    reason: str

    def covers(self, program: str, check: str) -> bool:
        """Return whether a check may differ."""
        return program == self.program and any(fnmatchcase(check, each) for each in self.checks)


@dataclass
class Result:
    """A program's outcomes at redis-server alone and through the proxy."""

    program: str
    alone: Outcomes
    swapped: Outcomes

    @property
    def compared(self) -> list[str]:
        """The checks at redis-server alone, without a suite's tests that fail there: most are about newer versions."""
        return [name for name, found in self.alone.items() if found != FAILED]

    @property
    def different(self) -> list[str]:
        """The compared checks whose outcomes differ, also those that only one address has."""
        more = [name for name in self.swapped if name not in self.alone]
        return [name for name in (*self.compared, *more) if self.alone.get(name) != self.swapped.get(name)]

    @property
    def broken(self) -> list[str]:
        """The checks that fail at redis-server alone, which then compare nothing."""
        return [name for name, found in self.alone.items() if isinstance(found, dict) and set(found) == {"error"}]

    def unexplained(self, limits: Iterable[Limit]) -> list[str]:
        """Return the checks that differ and that no limit covers."""
        given = list(limits)
        return [name for name in self.different if not any(each.covers(self.program, name) for each in given)]

    def unneeded(self, limits: Iterable[Limit]) -> list[str]:
        """Return the globs of limits that cover no difference any more."""
        globs = [(each, glob) for each in limits if each.program == self.program for glob in each.checks]
        return [glob for _, glob in globs if not any(fnmatchcase(name, glob) for name in self.different)]


def limits(path: Path = LIMITS) -> list[Limit]:
    """Read the intended differences; ValueError if a line is not one."""
    rows: list[Mapping[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8")).get("limits", [])
    for row in rows:
        if set(row) != {"program", "checks", "reason"}:
            raise ValueError(f"{path}: a limit has program, checks and reason, not {sorted(row)}")
    return [Limit(row["program"], tuple(row["checks"]), row["reason"]) for row in rows]
