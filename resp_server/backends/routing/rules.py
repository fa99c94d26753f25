"""The rules of a proxy with an upstream: the owners of keys, by the keys' names. They come before jobs' key formats.

A file of rules is TOML:

    [[rule]]
    name = "dashboards"               # for messages; without it, the keys
    keys = "dash/<account>/apdex"     # as a state's key_format: a placeholder stands for any text
    owner = "state"                   # or "upstream", "prefer-state", "shadow"
    writes = "refuse"                 # or "drop", "pass"
    database = 0                      # as clients select it
    state_key = "golden:<account>"    # the state's own name of the key
    field = "apdex"                   # the key is this field of the state's key
    compare = "number:1e-9"           # for owner = "shadow"
    cache = "5s"                      # for owner = "upstream"; or "tracking"

The first rule that covers a key decides. A file is taken whole or not at all: `parse_rules` collects all mistakes.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from resp_server.backends.routing.format_patterns import covers
from resp_server.backends.routing.key_aliases import KeyAlias, StateKey
from state_backend.model.descriptor import KeyFormat
from state_backend.model.errors import SparkisError

# The compiled forwarder compares a key with one rule after the other (guess: 20 ns for each).
RULES_MAX = 1000
DATABASE_MAX = 2**31 - 1
TABLE = re.compile(r"^[ \t]*\[\[[ \t]*(?:rule|\"rule\"|'rule')[ \t]*\]\]", re.MULTILINE)
# A tolerance, as `compare` has it.
NUMBER = re.compile(r"number:(\d+(?:\.\d+)?(?:[eE][+-]?\d{1,2})?)")
# A time, as `cache` has it.
TIME = re.compile(r"(\d{1,9}(?:\.\d+)?)(ms|s|m|h)")
UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
CACHE_S_MAX = 3600.0
# `cache` without a time: replies are cached until the upstream's CLIENT TRACKING reports a change.
UNTIL_CHANGED, UNTIL_CHANGED_S = "tracking", math.inf
SHOWN_CHARACTERS_MAX = 100


class Owner(Enum):
    """The owner of keys."""

    STATE = "state"
    UPSTREAM = "upstream"
    PREFER_STATE = "prefer-state"  # a state that has the key, otherwise the upstream, to which all writes go
    SHADOW = "shadow"  # the upstream, whose replies are compared with the state's


class Writes(Enum):
    """The effect of a write with a state's key: an error; OK without effect, if it is a plain SET; a write upstream."""

    REFUSE = "refuse"
    DROP = "drop"
    PASS = "pass"


@dataclass(frozen=True)
class Rule:
    """The owner of the keys of a format.

    Args:
        writes: The writes of states' keys.
        database: Where the keys are.
        alias: The names by which clients know the states' keys, or fields of them; None: the states' own names.
        tolerance: The most by which numbers of a shadow may differ; None: they may not.
        cache_s: How long replies may be cached; 0: they may not; UNTIL_CHANGED_S: exactly until the key changes.
    """

    name: str
    keys: KeyFormat
    owner: Owner
    writes: Writes = Writes.REFUSE
    database: int = 0
    alias: KeyAlias | None = None
    tolerance: float | None = None
    cache_s: float = 0.0

    @property
    def is_cached_exactly(self) -> bool:
        """Return whether replies are cached exactly until the key changes."""
        return self.cache_s == UNTIL_CHANGED_S

    @property
    def has_state_keys(self) -> bool:
        """Return whether states may have keys of this rule."""
        return self.owner in (Owner.STATE, Owner.PREFER_STATE)

    @property
    def answering(self) -> Owner:
        """The owner whose replies clients get."""
        return Owner.UPSTREAM if self.owner is Owner.SHADOW else self.owner

    @property
    def lists_aliases(self) -> bool:
        """Return whether SCAN and KEYS show states' keys, or fields of them, by this rule's aliases."""
        return self.has_state_keys and self.alias is not None

    @property
    def state_keys(self) -> KeyFormat:
        """The states' own names of the keys."""
        return self.keys if self.alias is None else self.alias.state_key

    def state_key_of(self, key: bytes) -> StateKey:
        """Return the state's own name of a key that the rule covers."""
        return StateKey(key, None) if self.alias is None else self.alias.state_key_of(key)


Rules = Sequence[Rule]
Option = TypeVar("Option", bound=Enum)


class RulesError(SparkisError):
    """A file cannot be read, or has mistakes; the message has all of them."""

    def __init__(self, source: str, mistakes: Sequence[str]) -> None:
        count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        super().__init__(f"{source} has {count}: {'; '.join(mistakes)}")
        self.mistakes = mistakes


def parse_rules(text: str, source: str) -> Rules:
    """Return the rules of a text; RulesError with all mistakes.

    Args:
        source: The source, for messages.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RulesError(source, [f"it is not TOML: {error}"]) from None
    mistakes = [f"unknown table or setting {name!r}: rules are [[rule]] tables" for name in tables if name != "rule"]
    rows = tables.get("rule", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise RulesError(source, [*mistakes, "'rule' is not a list of tables: write [[rule]]"])
    if len(rows) > RULES_MAX:
        raise RulesError(source, [*mistakes, f"it has {len(rows)} rules; at most {RULES_MAX} are possible"])
    places = _places(text, rows)
    rules: dict[int, Rule] = {}
    for number, row in enumerate(rows):
        reader = _RuleReader(row)
        rule = reader.read()
        mistakes += [f"{places[number]}: {each}" for each in reader.mistakes]
        if rule is not None:
            rules[number] = rule
    mistakes += _conflicts(rules, places)
    if mistakes:
        raise RulesError(source, mistakes)
    return list(rules.values())


class _RuleReader:
    """Reads the table of one rule, and collects its mistakes."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self._row = dict(row)
        self.mistakes: list[str] = []

    def read(self) -> Rule | None:
        """Return the rule; None if it has mistakes."""
        keys = self._keys()
        owner = self._option("owner", Owner, None)
        if owner is not Owner.STATE and "writes" in self._row:
            self.mistakes.append("'writes' is for owner = \"state\"")
        writes = self._option("writes", Writes, Writes.REFUSE)
        database = self._database()
        alias = None if keys is None else self._alias(keys, owner)
        tolerance = self._tolerance(owner)
        cache_s = self._cache(owner)
        name = self._text("name", keys.text if keys is not None else "")
        self.mistakes += [f"unknown setting {_shortened(key)}" for key in self._row]
        if self.mistakes or keys is None or owner is None or name is None or writes is None:
            return None
        return Rule(name, keys, owner, writes, database, alias, tolerance, cache_s)

    def _keys(self) -> KeyFormat | None:
        if "keys" not in self._row:
            self.mistakes.append("it has no 'keys'")
            return None
        return self._format("keys")

    def _alias(self, keys: KeyFormat, owner: Owner | None) -> KeyAlias | None:
        if "state_key" not in self._row:
            if "field" in self._row:
                del self._row["field"]
                self.mistakes.append("it has a 'field', but no 'state_key'")
            return None
        if owner is Owner.UPSTREAM:
            self.mistakes.append("'state_key' is not for owner = \"upstream\", whose keys no state answers")
        state_key = self._format("state_key")
        field = self._format("field") if "field" in self._row else None
        if state_key is None:
            return None
        alias = KeyAlias(keys, state_key, field)
        self.mistakes += alias.mistakes()
        return alias

    def _format(self, setting: str) -> KeyFormat | None:
        text = self._text(setting, "")
        if not text:
            return None
        if "*" in text:
            remedy = _shortened(text.replace("*", "<any>", 1))
            self.mistakes.append(f"{setting} {_shortened(text)} has a '*': write a placeholder, such as {remedy}")
            return None
        try:
            return KeyFormat.parse(text)
        except SparkisError as error:
            self.mistakes.append(str(error))
            return None

    def _text(self, setting: str, default: str) -> str | None:
        if setting not in self._row:
            return default
        value = self._row.pop(setting)
        if isinstance(value, str) and value:
            return value
        self.mistakes.append(f"{setting} is {_shortened(value)}; it must be a text that is not empty")
        return None

    def _tolerance(self, owner: Owner | None) -> float | None:
        if "compare" not in self._row:
            return None
        value = self._row.pop("compare")
        if owner is not Owner.SHADOW:
            self.mistakes.append("'compare' is for owner = \"shadow\"")
        found = NUMBER.fullmatch(value) if isinstance(value, str) else None
        if found is None and value != "exact":
            self.mistakes.append(f'compare is {_shortened(value)}; it must be "exact", or such as "number:1e-9"')
        return float(found[1]) if found is not None else None

    def _cache(self, owner: Owner | None) -> float:
        if "cache" not in self._row:
            return 0.0
        value = self._row.pop("cache")
        if owner is not Owner.UPSTREAM:
            self.mistakes.append("'cache' is for owner = \"upstream\"")
        if value == UNTIL_CHANGED:
            return UNTIL_CHANGED_S
        found = TIME.fullmatch(value) if isinstance(value, str) else None
        time_s = 0.0 if found is None else float(found[1]) * UNITS_S[found[2]]
        if not 0 < time_s <= CACHE_S_MAX:
            self.mistakes.append(
                f'cache is {_shortened(value)}; it must be a time such as "500ms", "5s" or "2m", at most 1h, '
                'or "tracking"'
            )
        return time_s

    def _database(self) -> int:
        value = self._row.pop("database", 0)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= DATABASE_MAX:
            return value
        self.mistakes.append(f"database is {_shortened(value)}; it must be a number from 0 to {DATABASE_MAX}")
        return 0

    def _option(self, setting: str, options: type[Option], default: Option | None) -> Option | None:
        names = ", ".join(f'"{each.value}"' for each in options)
        if setting not in self._row:
            if default is None:
                self.mistakes.append(f"it has no '{setting}': one of {names}")
            return default
        value = self._row.pop(setting)
        found = next((option for option in options if option.value == value), None)
        if found is None:
            self.mistakes.append(f"{setting} is {_shortened(value)}; it must be one of {names}")
        return found


def _conflicts(rules: Mapping[int, Rule], places: Sequence[str]) -> list[str]:
    """Return the mistakes of rules that could never apply."""
    found = []
    first_of: dict[str, int] = {}
    for number, rule in rules.items():
        earlier = first_of.setdefault(rule.name, number)
        if earlier != number:
            found.append(f"{places[number]}: it has the name of {places[earlier]}")
        before = [(at, each) for at, each in rules.items() if at < number and each.database == rule.database]
        hiding = next((at for at, each in before if covers(each.keys, rule.keys)), None)
        if hiding is not None:
            found.append(
                f"{places[number]}: it conflicts with {places[hiding]}, which covers all of its keys and comes first, "
                "so that it would never apply; remove one of them, or put the narrower one first"
            )
    return found


def _places(text: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return how messages name each rule: by number, name or keys, and line."""
    lines = [text.count("\n", 0, found.start()) + 1 for found in TABLE.finditer(text)]
    places = []
    for number, row in enumerate(rows):
        label = next((row[word] for word in ("name", "keys") if isinstance(row.get(word), str)), None)
        name = "" if label is None else f" {_shortened(label)}"
        # Tables within a text of several lines, or rules in one line, have no lines that are certain.
        line = f" (line {lines[number]})" if len(lines) == len(rows) else ""
        places.append(f"rule {number + 1}{name}{line}")
    return places


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS_MAX else f"{text[:SHOWN_CHARACTERS_MAX]}..."
