"""An analysis of an upstream's keys before a swap: the owner that each key would have. Pure.

Each key is counted for a rule, for a state by its key format, or for a group of similar names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from resp_server.backends.routing.format_patterns import covers
from resp_server.backends.routing.key_matcher import KeyMatcher, OwnedFormat
from resp_server.backends.routing.key_patterns_found import FoundKey, NameGroups
from resp_server.backends.routing.rules import Owner, Rule
from state_backend.model.descriptor import KeyFormat

# The number of keys of each row whose types, and existence in the states, are read.
SAMPLES_MAX = 100
SHOWN_CHARACTERS_MAX = 60


class AnalyzedState(NamedTuple):
    """A state.

    Args:
        name: `job:state`.
        type: What TYPE replies for its keys.
    """

    name: str
    key_format: str
    type: str


@dataclass
class AnalyzedKeys:
    """Keys of one rule, of one state, or of one group.

    Args:
        keys: A key format.
        state: The state that has such keys.
        types: The types of the samples.
        compared: Samples that were looked up in the states.
        absent: Those that the states lack.
    """

    keys: str
    owner: Owner
    state: AnalyzedState | None = None
    rule: Rule | None = None
    count: int = 0
    samples: list[FoundKey] = field(default_factory=list)
    types: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    absent: int = 0

    def add(self, key: FoundKey) -> None:
        """Count a key."""
        self.count += 1
        if len(self.samples) < SAMPLES_MAX:
            self.samples.append(key)

    @property
    def other_types(self) -> Sequence[str]:
        """The types of keys that the state's keys do not have."""
        return () if self.state is None else sorted(each for each in self.types if each != self.state.type)


class KeyAnalysis:
    """The keys of an upstream that were read."""

    def __init__(self, states: Sequence[AnalyzedState], rules: Sequence[Rule] = ()) -> None:
        self._matcher = KeyMatcher([OwnedFormat(state.key_format, state.name) for state in states], rules)
        self.by_rule = {
            rule.name: AnalyzedKeys(rule.keys.text, rule.owner, _state_of(rule, states), rule)
            for rule in rules
            if not rule.database
        }
        self.by_state = {state.name: AnalyzedKeys(state.key_format, Owner.STATE, state) for state in states}
        self._names = NameGroups()
        self.count = 0

    def add(self, key: FoundKey) -> None:
        """Count a key."""
        self.count += 1
        decision = self._matcher.decide(key.name)
        if decision.rule is not None:
            self.by_rule[decision.rule.name].add(key)
        elif decision.state:
            self.by_state[decision.state].add(key)
        else:
            self._names.add(key)

    def rows(self) -> Sequence[AnalyzedKeys]:
        """Return the rules, the states and the groups. To be called once, after all keys."""
        return [*self.by_rule.values(), *self.by_state.values(), *self._groups()]

    def _groups(self) -> Iterator[AnalyzedKeys]:
        for group in self._names.groups():
            yield AnalyzedKeys(group.pattern, Owner.UPSTREAM, count=group.key_count, samples=list(group.examples))


def decisions(rows: Sequence[AnalyzedKeys]) -> Sequence[str]:
    """Return the decisions that the owner of the upstream has to make, as sentences."""
    found: list[str] = []
    states = [row for row in rows if row.state is not None and row.rule is None]
    for row in states:
        if row.count:
            found += _about_copies(row)
    for index, row in enumerate(states):
        found += [_both(row, other) for other in states[:index] if _make_one_key(row, other)]
    return found


def _about_copies(row: AnalyzedKeys) -> Iterator[str]:
    assert row.state is not None
    keys = f"{row.count:,} {'key' if row.count == 1 else 'keys'} {row.keys}"
    state, looked_at = row.state.name, sum(row.types.values())
    if row.other_types:
        counted = sum(row.types[each] for each in row.other_types)
        yield (
            f"{keys}: {counted} of {looked_at} looked at {'has' if counted == 1 else 'have'} another type, "
            f"{', '.join(row.other_types)}, and {state} is a {row.state.type}. Keep them at the upstream if they are "
            "other keys than the state's"
        )
    if row.absent:
        yield (
            f"{keys}: {state} does not have {row.absent} of {row.compared}, so that these would be nil. "
            'owner = "prefer-state" reads such keys from the upstream'
        )
    if not row.other_types and not row.absent:
        yield f"{keys}: from the upstream, as today, or from {state}"


def _make_one_key(one: AnalyzedKeys, other: AnalyzedKeys) -> bool:
    """Return whether all keys of one row have the format of the other one."""
    first, second = KeyFormat.parse(one.keys), KeyFormat.parse(other.keys)
    return covers(first, second) or covers(second, first)


def _both(one: AnalyzedKeys, other: AnalyzedKeys) -> str:
    names = [row.state.name for row in (one, other) if row.state is not None]
    return (
        f"keys {one.keys} and {other.keys}: {' and '.join(names)} may have the same keys, and only one of them "
        "answers: change the key_format of the other one"
    )


def _state_of(rule: Rule, states: Sequence[AnalyzedState]) -> AnalyzedState | None:
    """Return the only state that has the keys of a rule by the same names; None if there is not exactly one."""
    if rule.alias is not None:
        return None
    found = [state for state in states if covers(rule.keys, KeyFormat.parse(state.key_format))]
    return found[0] if len(found) == 1 else None


def printable(key: bytes) -> str:
    """Return a key as text in one line, without control characters."""
    text = "".join(each if each.isprintable() else repr(each)[1:-1] for each in key.decode("utf-8", "backslashreplace"))
    return text if len(text) <= SHOWN_CHARACTERS_MAX else f"{text[:SHOWN_CHARACTERS_MAX]}..."
