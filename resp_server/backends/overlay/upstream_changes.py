"""Changes of the upstream's keys: the cache forgets the keys, and legacy writers are detected by them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain

from resp_server.backends.overlay.cached_reads import CachedReads
from resp_server.backends.overlay.legacy_writers import LegacyWriterDetector
from resp_server.backends.overlay.rules_reload import RulesReload
from resp_server.backends.overlay.shadow import Shadow
from resp_server.backends.redis.key_changes import KeyChanges
from resp_server.backends.redis.logins import Logins
from resp_server.backends.redis.upstream import Upstream
from resp_server.backends.routing.ownership import Ownership
from resp_server.backends.routing.result_cache import ResultCache
from resp_server.backends.routing.router import Router
from resp_server.backends.routing.rules import Rules
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.answers import ReplyFuture, ask


class UpstreamChanges:
    """Follows the changes that the current rules need.

    Args:
        shadow: Sends reads to the states.
    """

    def __init__(
        self, upstream: Upstream, ownership: Ownership, router: Router, logins: Logins, shadow: Shadow
    ) -> None:
        self._ownership, self._router, self._logins = ownership, router, logins
        self.cache = ResultCache(time.monotonic)
        self.events = KeyChanges(upstream, self._changed)
        self.cached = CachedReads(self.cache, self.events)
        self.legacy_writers = LegacyWriterDetector(
            lambda request: ask(partial(shadow.send_to_states, request[1], request, 2)),
            self._exists_at_upstream,
            time.monotonic,
        )
        self._candidates: Sequence[Rules] = ()  # rules that a reload is about to use

    def follow(self) -> None:
        """Clear the cache, and follow the changes of keys that may be cached or that a legacy writer may write."""
        self.cache.drop(None)
        self.follow_rules(*self._candidates)

    def follow_rules(self, *candidates: Rules) -> None:
        """Follow the keys of the current rules, and of other lists of rules that may replace them."""
        self._candidates = candidates
        rules = chain(self._ownership.rules, *candidates)
        cached = [rule.keys.literals[0].encode() for rule in rules if rule.cache_s]
        self.events.follow([*cached, *self.legacy_writers.watch(self._ownership.rules, *candidates)])

    def reload(self, upstream: Upstream) -> RulesReload:
        """Return what reads the rules file again."""
        return RulesReload(
            self._ownership, self.legacy_writers, self.follow_rules, self.events, lambda: upstream.is_down
        )

    def _exists_at_upstream(self, key: bytes, database: int) -> ReplyFuture:
        """Send EXISTS for a key to the upstream, over the proxy's own connections."""
        request: Request = (b"EXISTS", key)
        route = self._router.route(request, database)
        assert route is not None  # a command of Redis
        return ask(partial(self._logins.default.of(database).send_request, 0, 2, route.routed, request))

    def _changed(self, keys: Sequence[bytes] | None) -> None:
        """Handle changed keys; None: all keys may have changed."""
        self.cache.drop(keys)
        self.legacy_writers.changed(keys)

    def info_fields(self) -> Mapping[str, object]:
        """Return the fields of INFO."""
        return {
            "upstream_key_changes": self.events.status,
            **self.cache.info_fields(),
            **self.legacy_writers.info_fields(),
        }
