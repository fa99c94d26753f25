"""Reloads the rules file of a running proxy. The keys of new `prefer-state` rules are first watched for legacy writers.

Rules with `cache = "tracking"` need CLIENT TRACKING at the upstream, also those with which the proxy starts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from resp_server.backends.overlay.legacy_writers import WATCH_S, LegacyWriterDetector
from resp_server.backends.redis.key_changes import CONNECTING, ON, KeyChanges
from resp_server.backends.routing.format_patterns import may_share_keys
from resp_server.backends.routing.ownership import Ownership
from resp_server.backends.routing.rules import UNTIL_CHANGED, Owner, Rule, Rules, RulesError
from resp_server.backends.routing.rules_file import RulesFile
from resp_server.protocol.errors import GenericError
from resp_server.protocol.replies import Reply
from state_backend.model.descriptor import KeyFormat

logger = logging.getLogger("sparkis.proxy")

# The time for the upstream to begin to track, and the pause between two checks.
TRACKING_S_MAX, TRACKING_PAUSE_S = 3.0, 0.05
# Watching takes most of this time.
RELOAD_S_MAX = WATCH_S + 3.0

# The time for the states' key formats to become known at a first start, and the pause between looks (guesses).
KNOWN_S_MAX = 60.0
KNOWN_POLL_S = 0.05

# Called with a function that returns the number of rules, or raises GenericError.
Then = Callable[[Callable[[], Reply]], None]


class RulesReload:
    """Reads rules, and puts them to use.

    Args:
        watch: Also follows the keys of new rules, by `changes`.
    """

    def __init__(
        self,
        ownership: Ownership,
        legacy_writers: LegacyWriterDetector,
        watch: Callable[..., None],
        changes: KeyChanges,
        is_upstream_down: Callable[[], bool],
    ) -> None:
        self._ownership, self._legacy_writers, self._watch, self._changes = ownership, legacy_writers, watch, changes
        self._is_upstream_down = is_upstream_down
        self._is_watching = False

    def begin(self, then: Then) -> None:
        """Read the file. GenericError with all mistakes of the file: the rules then stay as they were."""
        file = self._ownership.rules_file
        if file is None:
            raise GenericError("this proxy has no rules file: start it with --routes FILE")
        if self._is_watching:
            raise GenericError("the rules are being read; retry in a moment")
        try:
            rules = file.read()
        except RulesError as error:
            raise _refused(str(error)) from None
        wait_s = self._legacy_writers.wait_s(rules, self._ownership.formats())
        exact = _exact(rules)
        if wait_s > 0 or exact:
            self._is_watching = True
            self._watch(rules)
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + TRACKING_S_MAX

        def decide() -> None:
            if exact and self._waits(ends_s):
                loop.call_later(TRACKING_PAUSE_S, decide)
            else:
                self._decide(file, rules, then)

        if wait_s > 0:
            loop.call_later(wait_s, decide)
        else:
            decide()

    async def check(self) -> None:
        """Wait until the upstream tracks keys of the current rules, if one needs that; RulesError if it cannot."""
        ends_s = asyncio.get_running_loop().time() + TRACKING_S_MAX
        while _exact(self._ownership.rules) and self._waits(ends_s):
            await asyncio.sleep(TRACKING_PAUSE_S)
        refusal, file = self._tracking_refusal(self._ownership.rules), self._ownership.rules_file
        if refusal is not None and file is not None:
            raise RulesError(str(file.path), [refusal])

    def _waits(self, ends_s: float) -> bool:
        """Return whether the upstream has not said yet whether it tracks keys."""
        return self._changes.status == CONNECTING and asyncio.get_running_loop().time() < ends_s

    def _tracking_refusal(self, rules: Rules) -> str | None:
        """Return why rules cannot be used; None: they can. An upstream that is down may track keys when it is up."""
        exact = _exact(rules)
        if not exact or self._changes.status == ON or self._is_upstream_down():
            return None
        return (
            f"the rule {exact[0].name!r} has cache = {UNTIL_CHANGED!r}, which needs CLIENT TRACKING at the upstream "
            f"(Redis 6 or later): {self._changes.reason}"
        )

    async def check_at_start(self) -> None:
        """Watch the rules with which the proxy starts; RulesError if a legacy writer runs."""
        rules, file = self._ownership.rules, self._ownership.rules_file
        if not any(rule.owner is Owner.PREFER_STATE for rule in rules):
            return
        ends_s = time.monotonic() + KNOWN_S_MAX
        while not self._ownership.is_known and time.monotonic() < ends_s:
            await asyncio.sleep(KNOWN_POLL_S)
        await asyncio.sleep(WATCH_S)
        refusal = self._legacy_writers.refusal(rules)
        if refusal is not None and file is not None:
            raise RulesError(str(file.path), [f"{refusal}; with --copiers report the proxy starts nevertheless"])

    def check_confirmed(self, job: str) -> None:
        """Raise GenericError if a legacy writer writes keys of a job for which a rule in force has prefer-state."""
        texts = [text for row in self._ownership.jobs() if row.job == job for text in row.formats]
        formats = [KeyFormat.parse(text) for text in texts]
        rules = [rule for rule in self._ownership.rules if any(may_share_keys(rule.keys, each) for each in formats)]
        refusal = self._legacy_writers.refusal(rules)
        if refusal is not None:
            raise GenericError(f"job '{job}' is not confirmed: {refusal}")

    def _decide(self, file: RulesFile, rules: Rules, then: Then) -> None:
        self._is_watching = False
        refusal = self._tracking_refusal(rules) or self._legacy_writers.refusal(rules)
        if refusal is not None:
            error = _refused(refusal)
            self._watch()

            def refuse() -> Reply:
                raise error

            then(refuse)
            return
        if (status := self._changes.status) not in (ON, "off"):
            logger.warning("copiers of keys with prefer-state rules cannot be detected: %s", status)
        count = self._take(file, rules)
        self._watch()
        then(lambda: count)

    def _take(self, file: RulesFile, rules: Rules) -> int:
        self._ownership.take_rules(rules)
        logger.info("read %d rules from %s", len(rules), file.path)
        return len(rules)


def _exact(rules: Rules) -> Sequence[Rule]:
    return [rule for rule in rules if rule.is_cached_exactly]


def _refused(reason: str) -> GenericError:
    logger.error("the rules stay as they were: %s", reason)
    return GenericError(f"the rules stay as they were: {reason}")
