"""Detects programs that still copy states' keys into the upstream, where a rule has `prefer-state`.

Such a rule hides the upstream's copy of a key while the states have the key. If a legacy writer still runs, its copies
outlive the states' keys, and clients read old copies once the states lose these keys. So the proxy follows the changes
of the keys at the upstream. A change counts as a copy if both backends have the key afterwards; copies that expire or
are deleted do not count. After a few copies within a minute, a new rule is refused, and a rule in use is reported.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from resp_server.backends.routing.format_patterns import may_share_keys
from resp_server.backends.routing.key_aliases import exists_request
from resp_server.backends.routing.key_matcher import KeyMatcher
from resp_server.backends.routing.rules import Owner, Rule, Rules
from resp_server.protocol.errors import client_text
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.answers import ReplyFuture, all_of, in_background
from state_backend.model.descriptor import KeyFormat

logger = logging.getLogger("sparkis.proxy")

# Fewer writes may be a person's; a legacy writer writes again and again (guesses).
WRITES_MIN = 3
WINDOW_S = 60.0
# Keys of a new rule are watched for this long before the rule is used (guess: some micro-batches of a fast job).
WATCH_S = 5.0
# The keys that are checked of one push of the upstream, and at a time.
KEYS_PER_PUSH = 64
CHECKS_MAX = 16
EXISTS_ONE = b":1\r\n"


@dataclass
class Copied:
    """The copies of one rule's keys.

    Args:
        since_s: When the rule was first watched.
        times_s: The times of the last copies.
    """

    since_s: float
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=WRITES_MIN))
    count: int = 0
    example: bytes = b""


class LegacyWriterDetector:
    """Counts writes at the upstream of keys that the states have, by rule.

    Args:
        check_states: Sends a request that tells whether the states have a key.
        check_upstream: Sends EXISTS for a key, in the database with a number.
    """

    def __init__(
        self,
        check_states: Callable[[Request], ReplyFuture],
        check_upstream: Callable[[bytes, int], ReplyFuture],
        clock: Callable[[], float],
    ) -> None:
        self.check_states, self.check_upstream, self._clock = check_states, check_upstream, clock
        self._matchers: Sequence[KeyMatcher] = ()
        self._copied: dict[Rule, Copied] = {}
        self._checks = 0  # that run

    def watch(self, *all_rules: Rules) -> Sequence[bytes]:
        """Watch the keys of these lists of rules; return the prefixes of keys to follow."""
        watched = dict.fromkeys(rule for rules in all_rules for rule in rules if rule.owner is Owner.PREFER_STATE)
        self._matchers = [KeyMatcher((), rules) for rules in all_rules] if watched else ()
        self._copied = {rule: self._copied.get(rule) or Copied(self._clock()) for rule in watched}
        return [rule.keys.prefix for rule in watched]

    def changed(self, keys: Sequence[bytes] | None) -> None:
        """Check keys that have changed at the upstream; None: any key may have changed, so none is checked."""
        if not self._matchers:
            return
        for key in islice(keys or (), KEYS_PER_PUSH):
            rules = {
                decider(key).rule: database
                for matcher in self._matchers
                for database in matcher.databases
                for decider in [matcher.decider(database)]
            }
            for rule, database in rules.items():
                if rule in self._copied and self._checks < CHECKS_MAX:
                    in_background(self._check(rule, key, database))

    def refusal(self, rules: Rules) -> str | None:
        """Return why rules are refused; None: no legacy writer was seen."""
        found = [(rule, self._copied[rule]) for rule in rules if rule in self._copied and self._is_running(rule)]
        return "; ".join(f"rule '{rule.name}': {_text(copied)}" for rule, copied in found) or None

    def wait_s(self, rules: Rules, formats: Sequence[str]) -> float:
        """Return how long rules still have to be watched before they are used."""
        known = [KeyFormat.parse(each) for each in formats]
        now_s, left_s = self._clock(), 0.0
        for rule in rules:
            if rule.owner is Owner.PREFER_STATE and any(may_share_keys(rule.state_keys, each) for each in known):
                since_s = self._copied[rule].since_s if rule in self._copied else now_s
                left_s = max(left_s, since_s + WATCH_S - now_s)
        return left_s

    def info_fields(self) -> Mapping[str, object]:
        """Return the fields of INFO."""
        return {
            "copiers": ",".join(rule.name for rule in self._copied if self._is_running(rule)),
            "copied_writes": sum(each.count for each in self._copied.values()),
        }

    async def _check(self, rule: Rule, key: bytes, database: int) -> None:
        """Check whether both backends have a key."""
        self._checks += 1
        try:
            answers = await all_of(
                [self.check_upstream(key, database), self.check_states(exists_request(rule.state_key_of(key)))]
            )
        except Exception:  # it is not known
            return
        finally:
            self._checks -= 1
        if all(answer.reply == EXISTS_ONE for answer in answers):
            self._count(rule, key)

    def _count(self, rule: Rule, key: bytes) -> None:
        """Count a copy of a key."""
        copied = self._copied.get(rule)
        if copied is None:
            return
        was_running = self._is_running(rule)
        copied.times_s.append(self._clock())
        copied.count += 1
        copied.example = key
        if not was_running and self._is_running(rule):
            logger.error("rule '%s': %s", rule.name, _text(copied))

    def _is_running(self, rule: Rule) -> bool:
        times_s = self._copied[rule].times_s
        return len(times_s) == WRITES_MIN and self._clock() - times_s[0] < WINDOW_S


def _text(copied: Copied) -> str:
    return (
        f'owner = "prefer-state" beside a program that still writes keys that the states have, such as '
        f"'{client_text(copied.example)}', {WRITES_MIN} times or more within {WINDOW_S:g} s: clients do not see these "
        "writes, and the copies come back when the states lose the keys; stop that program, or write "
        'owner = "state", writes = "pass"'
    )
