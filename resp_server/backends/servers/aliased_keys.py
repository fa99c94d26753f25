"""The clients' names of states' keys, and their databases, for invalidations and keyspace notifications.

A state reports that `golden:byAccount:7` has changed; clients know this key as `dash/7/apdex`. A rule maps a whole key,
or a single field, to its name. A rule for all fields of a hash does not: a state does not report which fields have
changed. So the names of fields that tracking clients read are recorded, and all of a key's names are invalidated with
it. For notifications the fields are read (`field_notifications.py`).

Servers notify of keys in database 0. A rule may put keys into another one. Clients are notified of these on the
channels of that database, by the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from resp_server.backends.routing.format_patterns import glob_of
from resp_server.backends.routing.key_aliases import StateKey
from resp_server.backends.routing.ownership import Ownership
from resp_server.backends.routing.rules import Owner, Rule, Rules
from resp_server.backends.servers.field_names import FieldRules, NameInDatabase, has_fields
from resp_server.protocol.glob import literal_start
from resp_server.push.keyspace_notifications import KEYEVENT, KEYSPACE, heads_of
from resp_server.session.subscriptions import SubscriptionKind

# The names that are recorded. Beyond this number, all keys are invalidated and all names are dropped (guess: 30 MB).
READ_NAMES_MAX = 100_000


class AliasedKeys:
    """The names of states' keys by the current rules."""

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership
        self._rules: Rules = ()
        self._listed: Sequence[Rule] = ()
        self._notified: Sequence[Rule] = ()
        # The clients' names that were read, by the state's key.
        self._read: dict[bytes, dict[bytes, None]] = {}
        self._read_count = 0

    @property
    def rules(self) -> Rules:
        """The current rules."""
        return self._ownership.rules

    @property
    def listed(self) -> Sequence[Rule]:
        """The rules with names of states' keys, or of fields of them."""
        self._take_rules()
        return self._listed

    @property
    def notified(self) -> Sequence[Rule]:
        """The rules whose keys clients know by another name, or in another database, than servers do."""
        self._take_rules()
        return self._notified

    def _take_rules(self) -> None:
        if self._rules is not self._ownership.rules:
            self._rules = self._ownership.rules
            self._listed = [rule for rule in self._rules if rule.lists_aliases]
            self._notified = [
                rule for rule in self._rules if rule.lists_aliases or (rule.database and rule.has_state_keys)
            ]

    @property
    def field_rules(self) -> FieldRules:
        """The rules with names of fields."""
        return FieldRules([rule for rule in self.listed if has_fields(rule)], self._ownership.matcher.decider)

    def is_state(self, key: bytes) -> bool:
        """Return whether states answer a key, by its own name, in database 0, or may answer it."""
        found = self._ownership.matcher.decide(key)
        return found.owner is not Owner.UPSTREAM and (found.rule is None or found.rule.alias is None)

    def aliases_of(self, state_key: bytes, rules: Iterable[Rule]) -> Iterator[NameInDatabase]:
        """Iterate over the names of a key of a state, by some rules; of its fields only those that no reply names."""
        for rule in rules:
            alias = rule.alias
            name = state_key if alias is None else alias.key_of(StateKey(state_key, alias.only_field))
            if name is not None and self._ownership.matcher.decider(rule.database)(name).rule is rule:
                yield NameInDatabase(rule.database, name)

    # -- tracking -----------------------------------------------------------------------------------------------------

    def record_read(self, state_key: bytes, name: bytes) -> bool:
        """Record a name that a tracking client reads; False: there were too many, and all were dropped."""
        names = self._read.setdefault(state_key, {})
        self._read_count += name not in names
        names[name] = None
        has_room = self._read_count <= READ_NAMES_MAX
        if not has_room:
            self.forget_read()
        return has_room

    def forget_read(self) -> None:
        """Drop all names that were read: no client has a cached one any more."""
        self._read, self._read_count = {}, 0

    def with_aliases(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Return changed keys of states, and the clients' names of these keys."""
        if not self._read and not self.listed:
            return keys
        names: dict[bytes, None] = {}
        for key in keys:
            names |= self._read.get(key, {})
            names |= dict.fromkeys(each.name for each in self.aliases_of(key, self.listed))
        return [*keys, *names] if names else keys

    # -- notifications ------------------------------------------------------------------------------------------------

    def sources(self, *, has_keyspace: bool) -> Mapping[bytes, Sequence[Rule]]:
        """Return patterns that match the servers' notifications about `notified` rules, with these rules.

        Args:
            has_keyspace: Servers publish keyspace notifications; otherwise only keyevent notifications.
        """
        rules = self.notified
        if not has_keyspace:
            return {KEYEVENT + b"*": rules} if rules else {}
        found: dict[bytes, list[Rule]] = {}
        for rule in rules:
            found.setdefault(KEYSPACE + glob_of(rule.state_keys), []).append(rule)
        return found


def may_name(kind: SubscriptionKind, name: bytes, rules: Iterable[Rule]) -> bool:
    """Return whether a channel or pattern may get notifications with the names of some rules, in their databases."""
    if kind is SubscriptionKind.SHARD:
        return False
    is_pattern = kind is SubscriptionKind.PATTERN
    literal = literal_start(name) if is_pattern else name
    found = ((heads_of(rule.database), rule.keys.prefix) for rule in rules)
    starts = (start for heads, prefix in found for start in (heads.keyevent, heads.keyspace + prefix))
    return any(literal.startswith(start) or (is_pattern and start.startswith(literal)) for start in starts)
