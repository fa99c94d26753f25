"""Shows and changes the owners of keys at a proxy with an upstream, for STATE OWNERS, CONFIRM, RELEASE and others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from resp_server.backends.overlay.rules_reload import RELOAD_S_MAX, RulesReload
from resp_server.backends.overlay.shadow import Shadow
from resp_server.backends.routing.key_matcher import Decision
from resp_server.backends.routing.ownership import Ownership, UnknownJobError
from resp_server.backends.routing.rules import Owner, Writes
from resp_server.pipeline.proxy_context import OverlayControl
from resp_server.protocol.errors import GenericError, LoadingError
from resp_server.protocol.replies import Pending, Reply

# Keys of one STATE OWNER: with the most rules, a key takes 80 us (calculated from the cost of a rule).
NAMES_MAX = 128


class OverlayBackendControl(OverlayControl):
    """Shows and changes the owners of keys."""

    def __init__(
        self, ownership: Ownership, shadow: Shadow, reload: RulesReload, is_loading: Callable[[], bool]
    ) -> None:
        self._ownership, self._shadow, self._reload = ownership, shadow, reload
        self._is_loading = is_loading

    def owners(self) -> Reply:
        """Return a map for each job: its name, status, key formats, and examples of keys that it waits for."""
        return [
            {
                b"job": row.job.encode(),
                b"status": row.status.encode(),
                b"key_formats": [text.encode() for text in row.formats],
                b"examples": list(row.examples),
            }
            for row in self._ownership.jobs()
        ]

    def owner(self, keys: Sequence[bytes], database: int) -> Reply:
        """Return an array for each key: its owner, its state as `job:state` (empty: none has it), and its writes."""
        if not self._ownership.is_known:
            raise LoadingError("the key formats of the states are not known yet; retry in a moment")
        if self._is_loading():
            raise LoadingError("the state servers have not reported their jobs yet; retry in a moment")
        if len(keys) > NAMES_MAX:
            raise GenericError(f"{len(keys)} keys are given; at most {NAMES_MAX} are possible")
        matcher = self._ownership.matcher
        decide = matcher.decider(database)
        return [_owner_row(decide(key), matcher.owner_of(key, database)) for key in keys]

    def confirm(self, job: bytes) -> Reply:
        """Give a job's keys to its states; return its formats. GenericError if a legacy writer writes some keys."""
        self._reload.check_confirmed(job.decode("utf-8", "surrogateescape"))
        return _formats(self._ownership.confirm, job)

    def release(self, job: bytes) -> Reply:
        """Give a job's keys to the upstream; return its key formats."""
        return _formats(self._ownership.release, job)

    def shadow(self) -> Reply:
        """Return a map for each rule with owner `shadow`: the counts of comparisons, and the last differences."""
        return self._shadow.rows()

    def reload(self) -> Reply:
        """Reload the rules file; return the number of rules. GenericError with all mistakes: nothing changes then."""
        reply = Pending(RELOAD_S_MAX, _too_late)
        self._reload.begin(reply.resolve)
        return reply.make() if reply.is_resolved else reply

    async def end_at_legacy_writer(self) -> bool:
        """Watch for legacy writers in the first seconds: RulesError if one runs; otherwise wait for ever."""
        await self._reload.check_at_start()
        return await asyncio.Event().wait()

    async def check_tracking(self) -> None:
        """Wait until the upstream tracks the keys of rules with `cache = "tracking"`; RulesError if it cannot."""
        await self._reload.check()

    def reload_at_signal(self) -> None:
        """Reload the rules file, if there is one. Mistakes are logged."""
        if self._ownership.rules_file is not None:
            with suppress(GenericError):
                self._reload.begin(lambda make: None)


def _too_late() -> Reply:
    raise GenericError("the rules were not read in time")


def _owner_row(decision: Decision, state: str | None) -> Reply:
    writes = Writes.REFUSE if decision.rule is None else decision.rule.writes
    if decision.owner is not Owner.STATE:
        writes = Writes.PASS
    return [decision.owner.value.encode(), (state or "").encode(), writes.value.encode()]


def _formats(change: Callable[[str], Sequence[str]], job: bytes) -> Reply:
    try:
        return [text.encode() for text in change(job.decode("utf-8", "surrogateescape"))]
    except UnknownJobError as error:
        raise GenericError(str(error)) from None
