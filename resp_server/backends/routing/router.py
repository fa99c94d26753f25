"""Finds the route of a request (`route`), by a routing table. Pure.

`route_of` returns it at once. The keys of a long request are decided in steps (`route_in_steps`), so that other clients
are served between them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from resp_server.backends.routing.cross_db_commands import OtherKey, is_number, other_key
from resp_server.backends.routing.key_aliases import (
    FieldRead,
    StateKey,
    StateRead,
    exists_request,
    field_read,
    with_state_keys,
)
from resp_server.backends.routing.key_matcher import Decision, KeyMatcher
from resp_server.backends.routing.long_arguments import long_arguments, too_long, without_long_arguments
from resp_server.backends.routing.ownership import Ownership
from resp_server.backends.routing.route import (
    AliasedRoute,
    AllKeysRoute,
    CacheableRead,
    CachedKeysWrite,
    DroppedRoute,
    LocalRoute,
    PreferredRoute,
    ReplyUse,
    Route,
    SelectRoute,
    Shadowed,
    ShadowedRead,
    SplitRoute,
    StatesRoute,
    UncachedRead,
    UpstreamRoute,
)
from resp_server.backends.routing.rules import Owner, Writes
from resp_server.backends.routing.shadow_compare import is_comparable
from resp_server.backends.routing.state_writes import without_pairs, write_plan
from resp_server.backends.routing.upstream_settings import (
    EVENTS_REQUEST,
    asked_events,
    not_passed_on,
)
from resp_server.command.keys import key_runs, searches_keyword
from resp_server.command.overlay_commands import OverlayCommand, OverlayCommands, Routing
from resp_server.command.policy import AnsweredBy, SpecialCommand
from resp_server.command.table import CommandTable
from resp_server.protocol.errors import GenericError, LoadingError, client_text
from resp_server.protocol.request_parser import LongRequest, Request
from resp_server.raw_replies.raw_reply import Steps
from resp_server.session.transaction import WATCHED_KEYS_MAX

# Sections of INFO that only this process has.
LOCAL_SECTIONS = (b"proxy", b"sparkis")
# The size of an option of XREAD and XREADGROUP, with its values.
STREAM_OPTIONS = {b"GROUP": 3, b"COUNT": 2, b"NOACK": 1}
# Keys that are decided in one step (guess: 0.2 ms).
KEYS_AT_ONCE = 256
# Arguments of a request in which an option has to be found (guess: takes some milliseconds).
SEARCHED_ARGUMENTS_MAX = 1 << 15
# Decisions about states' keys that are kept of a long request that is not split: no command on states takes more keys.
DECISIONS_MAX = 4097
# Cached replies to COMMAND GETKEYS (guess: a few MB).
GETKEYS_CACHED_MAX = 1024
# Arguments of a request whose reply to COMMAND GETKEYS is cached (guess: a longer request is routed in steps).
GETKEYS_ARGUMENTS_MAX = 1024
# Keys of a long request that are compared with the states' values, where a rule says so (guess: enough to compare).
SHADOWED_KEYS_MAX = 1024
# Keys that an error names.
NAMED_KEYS_MAX = 8


class GetkeysCache:
    """Caches the keys that the upstream has returned to COMMAND GETKEYS, by the arguments of the request."""

    def __init__(self) -> None:
        self._keys: dict[Request, Sequence[bytes]] = {}

    def add(self, request: Request, keys: Sequence[bytes]) -> None:
        """Cache the keys of a request; the oldest entry makes room."""
        if len(self._keys) >= GETKEYS_CACHED_MAX:
            del self._keys[next(iter(self._keys))]
        self._keys[tuple(request)] = keys

    def positions(self, name: str, request: Request) -> Sequence[int]:
        """Return the positions of a request's keys; GenericError if they are not known."""
        arguments = tuple(request)
        keys = None if len(request) > GETKEYS_ARGUMENTS_MAX else self._keys.get(arguments)
        if keys is None:
            raise GenericError(f"the upstream does not say where the keys of '{name}' are, so it is not passed on")
        return sorted({arguments.index(key, 1) for key in keys})

    def has(self, request: Request) -> bool:
        """Return whether the keys of a request are known."""
        return tuple(request) in self._keys


class RoutingTable(NamedTuple):
    """What a route depends on, beside the request and the selected database.

    Args:
        is_known: The owners are known: before that, no key may be answered.
        default_database: The upstream's number of the clients' database 0.
    """

    commands: OverlayCommands
    keys: KeyMatcher
    is_known: bool
    getkeys_cache: GetkeysCache
    default_database: int

    def check_known(self) -> None:
        """Raise LoadingError before the owners of keys are known."""
        if not self.is_known:
            raise LoadingError("the key formats of the states are not known yet; retry in a moment")

    def client_number(self, number: int) -> int:
        """Return the number by which clients select a database of the upstream. -1: they cannot."""
        return 0 if number == self.default_database else number or -1

    def positions(self, routed: OverlayCommand, request: Request, *, is_long: bool = False) -> Sequence[int]:
        """Return the positions of keys, sorted unless `is_long`: to sort many would take too long."""
        if routed.needs_getkeys:
            return self.getkeys_cache.positions(routed.name, request)
        runs = [positions for positions, flags in key_runs(routed.facts, request) or () if "not_key" not in flags]
        if len(runs) == 1:
            return runs[0]
        return [at for run in runs for at in run] if is_long else sorted({at for run in runs for at in run})

    def owners_text(self, request: Request, positions: Sequence[int], database: int) -> str:
        """Return the owners of keys for an error."""
        named = [request[at] for at in positions[:NAMED_KEYS_MAX]]
        return ", ".join(f"key '{client_text(key)}' is {self.keys.owner_text(key, database)}" for key in named)

    def refusal(self, request: Request, at: int, decision: Decision, database: int) -> GenericError:
        """Return the error of a write with a state's key."""
        text, rule = self.owners_text(request, [at], database), decision.rule
        if rule is not None and rule.writes is Writes.DROP:
            text += f"; the rule '{rule.name}' drops plain SET, SETEX, PSETEX and MSET only"
        return GenericError(text)


def route_of(request: Request, table: RoutingTable, database: int = 0) -> Route | None:
    """Return the route of a request; None for an unknown command. ReplyError if no backend may answer it."""
    long_at = long_arguments(request)
    routed = table.commands.of(request)
    if long_at:
        if routed is None or routed.routing not in (Routing.BY_KEYS, Routing.UPSTREAM):
            raise too_long()
        request = without_long_arguments(request, long_at)
    if routed is None:
        return None
    if routed.routing is Routing.BY_KEYS:
        return _route_by_keys(routed, request, table, database, long_at)
    return _route_by_command(routed, request, table)


def _route_by_keys(
    routed: OverlayCommand, request: Request, table: RoutingTable, database: int, long_at: Collection[int]
) -> Route:
    table.check_known()
    if routed.single_key_at and routed.single_key_at < len(request):
        positions: Sequence[int] = (routed.single_key_at,)
    else:
        positions = table.positions(routed, request)
    if routed.policy.writes_other_database and (other := other_key(routed.name, request)) is not None:
        return _route_over_databases(routed, request, table, other, database)
    decide = table.keys.decider(database) if database else table.keys.decide
    decisions = [(at, found) for at in positions if (found := decide(request[at])).owner is not Owner.UPSTREAM]
    return _KeyedRequest(table, routed, request, database, positions, decisions, long_at).route()


def _route_over_databases(
    routed: OverlayCommand, request: Request, table: RoutingTable, other: OtherKey, database: int
) -> Route:
    """Return the route of a MOVE or COPY to another database: the first key is in the selected one."""
    number = table.client_number(other.number)
    found = table.keys.decider(number)(request[other.at])
    if found.owner is Owner.STATE and write_plan(routed.name, request, [(other.at, found)]).refused is not None:
        raise table.refusal(request, other.at, found, number)
    source = table.keys.decider(database)(request[1])
    decisions = [] if source.owner is Owner.UPSTREAM else [(1, source)]
    route = _KeyedRequest(table, routed, request, database, (1,), decisions, ()).route()
    return route._replace(use=_change_of_any(table)) if type(route) is UpstreamRoute else route


def _change_of_any(table: RoutingTable) -> CachedKeysWrite | None:
    """Return the use of the reply to a write that may change any cached key."""
    return CachedKeysWrite(None) if table.keys.has_cached else None


def _route_by_command(routed: OverlayCommand, request: Request, table: RoutingTable) -> Route:
    """Return the route of a request whose command decides about it."""
    answered_by, special = routed.answered_by_row, routed.policy.special
    if answered_by is AnsweredBy.ALL_KEYS:
        table.check_known()
        if routed.command is not None:
            routed.command.check_arity(request)
        return AllKeysRoute(routed)
    if routed.routing is Routing.DENIED:
        return _route_of_denied(routed, request)
    if special is SpecialCommand.INFO and answered_by is not None:
        is_local = any(section.lower() in LOCAL_SECTIONS for section in request[1:])
        return StatesRoute(routed) if is_local else UpstreamRoute(routed)
    if special is SpecialCommand.SELECT:
        return SelectRoute(routed)
    if special is SpecialCommand.SWAPDB:
        _check_swap(request, table)
    if answered_by is not None:
        return LocalRoute(routed) if answered_by is AnsweredBy.LOCAL else StatesRoute(routed)
    use = _change_of_any(table) if "write" in routed.facts.flags else None
    is_blocking = "blocking" in routed.facts.flags or routed.policy.waits_for_writes or routed.is_subscription
    return UpstreamRoute(routed, is_blocking=is_blocking, use=use)


def _route_of_denied(routed: OverlayCommand, request: Request) -> Route:
    """Return the route of a setting that the upstream may have already; GenericError for all other commands."""
    asked = asked_events(routed.name, request) if routed.policy.special is SpecialCommand.CONFIG_SET else None
    if asked is None:
        raise not_passed_on(routed.name)
    return UpstreamRoute(routed, EVENTS_REQUEST, use=asked)


def _check_swap(request: Request, table: RoutingTable) -> None:
    """Raise GenericError for a SWAPDB that would put keys of the upstream under the names of states' keys."""
    table.check_known()
    for number in request[1:3]:
        if is_number(number) and table.keys.has_states(table.client_number(int(number))):
            raise GenericError(
                f"database {int(number)} has keys of states, which would hide the upstream's; use others"
            )


def request_of_states(request: Request, at: int, table: RoutingTable, database: int = 0) -> Request:
    """Return a request that only states answer, with its key in place of an alias; GenericError for another key."""
    table.check_known()
    found = table.keys.decider(database)(request[at])
    state_keys = _state_keys(request, [(at, found)])
    is_upstreams = found.owner is Owner.UPSTREAM
    if is_upstreams or (at in state_keys and state_keys[at].field is not None):
        what = "keys of the upstream" if is_upstreams else "fields of a state's key"
        name = b" ".join(request[:at]).decode("utf-8", "replace").upper()
        raise GenericError(f"{name} is not available for {what}: {table.owners_text(request, [at], database)}")
    return with_state_keys(request, state_keys)


class _KeyedRequest:
    """A request with keys, and the owners of the keys.

    Args:
        decisions: The positions and decisions of keys that states may have.
        long_at: The positions of long arguments.
    """

    __slots__ = ("_database", "_decisions", "_long_at", "_of_states", "_positions", "_request", "_routed", "_table")

    def __init__(
        self,
        table: RoutingTable,
        routed: OverlayCommand,
        request: Request,
        database: int,
        positions: Sequence[int],
        decisions: Sequence[tuple[int, Decision]],
        long_at: Collection[int],
    ) -> None:
        self._table, self._routed, self._request, self._database = table, routed, request, database
        self._positions, self._decisions, self._long_at = positions, decisions, long_at
        self._of_states = (
            [(at, decision) for at, decision in decisions if decision.owner is Owner.STATE] if decisions else []
        )

    def route(self) -> Route:
        """Return the route; ReplyError if no backend may answer the request."""
        routed, decisions, of_states = self._routed, self._decisions, self._of_states
        if self._long_at and (decisions or not set(self._long_at).isdisjoint(self._positions)):
            raise too_long()
        if not decisions:
            return self.of_upstream()
        if routed.command is not None:
            routed.command.check_arity(self._request)
        is_watch = routed.policy.special is SpecialCommand.WATCH
        if is_watch and len(of_states) < len(self._positions):
            return self._both(decisions)
        if len(of_states) < len(decisions) and routed.is_read:
            return self._preferred()
        if not of_states:
            return self._changing(self.to_upstream())
        if not routed.is_read and not is_watch:
            return self._write()
        if len(of_states) == len(self._positions) and routed.is_served:
            return self._states()
        if routed.is_split:
            return self._both(of_states)
        if len(of_states) < len(self._positions):
            raise self._needs_one_backend()
        raise GenericError(self._owners_text([of_states[0][0]]))

    def of_upstream(self) -> UpstreamRoute:
        """Return the route of a request whose keys are all the upstream's."""
        routed, keys, route = self._routed, self._table.keys, self.to_upstream()
        if not (keys.has_cached or keys.has_shadows):
            return route
        decide = keys.decider(self._database)
        use: ReplyUse = None
        if keys.has_cached and not (self._long_at and routed.is_read):
            use = _cache_use(routed, self._request, self._positions, decide)
        if keys.has_shadows and routed.is_read and not route.is_blocking:
            shadowed = _shadowed(routed, self._request, self._positions, decide)
            if shadowed and type(use) is not CacheableRead:
                use = ShadowedRead(shadowed, use.exact if type(use) is UncachedRead else ())
        return route if use is None else route._replace(use=use)

    def to_upstream(self) -> UpstreamRoute:
        """Return the route of a request that the upstream gets unchanged."""
        is_blocking = "blocking" in self._routed.facts.flags and not _is_nonblocking_read(self._routed, self._request)
        return UpstreamRoute(self._routed, is_blocking=is_blocking)

    def _preferred(self) -> Route:
        """Return the route of a read with keys that the states answer if they have them."""
        routed, request = self._routed, self._request
        if "blocking" in routed.facts.flags and not _is_nonblocking_read(routed, request):
            raise GenericError(f"command '{routed.name}' cannot block: {self._owners_text(self._positions)}")
        if len(self._positions) == 1:
            ((at, found),) = self._decisions
            read = _state_read(routed, request, at, found)
            unserved = None
            if not read.reads:
                unserved = GenericError(f"{self._owners_text(self._positions)}, and the states have it")
            return PreferredRoute(routed, read, unserved)
        if not routed.is_split:
            raise self._needs_one_backend()
        return self._both(self._decisions)

    def _states(self) -> Route:
        """Return the route of a request with keys of states only."""
        routed, request = self._routed, self._request
        state_keys = _state_keys(request, self._of_states)
        if not state_keys:
            return StatesRoute(routed)
        if routed.policy.special is SpecialCommand.WATCH or all(
            state_key.field is None for state_key in state_keys.values()
        ):
            return AliasedRoute(routed, with_state_keys(request, state_keys))
        if routed.is_split and len(self._of_states) > 1:
            return self._both(self._of_states)
        (at, (key, field)), *more = state_keys.items()
        read = None if more or field is None else field_read(routed.name, request, key, field)
        if read is None:
            raise GenericError(
                f"command '{routed.name}' is not available for fields of a state's key: {self._owners_text([at])}"
            )
        return AliasedRoute(routed, read.request, read.convert, read.of_key)

    def _both(self, decisions: Sequence[tuple[int, Decision]]) -> Route:
        """Return the route of a request that is split.

        Args:
            decisions: The positions and decisions of the keys that states get, or get first.
        """
        routed, request = self._routed, self._request
        state_keys = [at for at, found in decisions if found.owner is Owner.STATE]
        preferred = {
            at: _state_read(routed, (request[0], request[at]), 1, found)
            for at, found in decisions
            if found.owner is Owner.PREFER_STATE
        }
        fixed = [(at, found) for at, found in decisions if at not in preferred]
        aliased = _state_keys(request, fixed)
        has_upstreams = len(fixed) < len(self._positions)
        can_overtake_cache = has_upstreams and self._table.keys.has_exactly_cached
        if not aliased:
            return SplitRoute(routed, state_keys, preferred, can_overtake_cache=can_overtake_cache)
        fields = {}
        for at, (key, field) in aliased.items():
            if field is None or routed.policy.special is SpecialCommand.WATCH:
                continue
            read = field_read(routed.name, request, key, field)
            if read is not None:
                fields[at] = read.request
        state_keys = [at for at in state_keys if at not in fields]
        return SplitRoute(routed, state_keys, preferred, with_state_keys(request, aliased), fields, can_overtake_cache)

    def _write(self) -> Route:
        """Return the route of a write with keys of states."""
        plan = write_plan(self._routed.name, self._request, self._of_states)
        if plan.refused is not None:
            decision = dict(self._of_states)[plan.refused]
            raise self._table.refusal(self._request, plan.refused, decision, self._database)
        if not plan.dropped:
            return self._changing(self.to_upstream())
        if len(plan.dropped) == len(self._positions):
            return DroppedRoute(self._routed)
        left = without_pairs(self._request, plan.dropped)
        return self._changing(UpstreamRoute(self._routed, left))

    def _changing(self, route: UpstreamRoute) -> UpstreamRoute:
        """Return a write's route with the keys that the write may change, if any key is cached."""
        if not self._table.keys.has_cached:
            return route
        return route._replace(use=CachedKeysWrite([self._request[at] for at in self._positions]))

    def _needs_one_backend(self) -> GenericError:
        return GenericError(
            f"command '{self._routed.name}' needs keys of one backend: {self._owners_text(self._positions)}"
        )

    def _owners_text(self, positions: Sequence[int]) -> str:
        return self._table.owners_text(self._request, positions, self._database)


def route_in_steps(request: Request, table: RoutingTable, database: int = 0) -> Steps[Route | None]:
    """Return the route of a request, in steps if it is long. A long read of both backends is split in chunks."""
    routed = table.commands.of(request)
    is_by_keys = routed is not None and routed.routing is Routing.BY_KEYS and not routed.single_key_at
    if routed is None or not is_by_keys or len(request) <= KEYS_AT_ONCE:
        return route_of(request, table, database)
    long_at = long_arguments(request)
    table.check_known()
    if long_at:
        request = without_long_arguments(request, long_at)
    found = _LongRequest(table, routed, request, database, long_at)
    for first in range(0, len(found.positions), KEYS_AT_ONCE):
        found.decide(first)
        yield
    return (yield from found.route())


class _LongRequest:
    """A long request, whose keys are decided in steps."""

    def __init__(
        self, table: RoutingTable, routed: OverlayCommand, request: Request, database: int, long_at: Collection[int]
    ) -> None:
        if len(request) > SEARCHED_ARGUMENTS_MAX and searches_keyword(routed.facts):
            raise GenericError(
                f"'{routed.name}' takes {SEARCHED_ARGUMENTS_MAX} arguments through --upstream; split the request"
            )
        self.positions = table.positions(routed, request, is_long=True)
        is_watch = routed.policy.special is SpecialCommand.WATCH
        if is_watch and len(self.positions) > WATCHED_KEYS_MAX:
            raise GenericError(f"a client may watch {WATCHED_KEYS_MAX} keys; UNWATCH, or watch fewer")
        if any(at in self.positions for at in long_at):
            raise too_long()
        self._table, self._routed, self._request, self._database = table, routed, request, database
        self._long_at, self._decide = long_at, table.keys.decider(database)
        self._is_write = not routed.is_read and not is_watch
        # An array, because to free a million tuples would take too long.
        self._decided_at = array("L")
        self._decisions: list[tuple[int, Decision]] = []  # the first of them
        self._decisions_max = WATCHED_KEYS_MAX if is_watch else DECISIONS_MAX
        self._dropped = bytearray()
        self._state_key_count = self._dropped_count = 0
        self._has_aliases = False

    def decide(self, first: int) -> None:
        """Find the owners of the next keys; GenericError for a write with a key of a state."""
        request, decide = self._request, self._decide
        some = self.positions[first : first + KEYS_AT_ONCE]
        found = [(at, made) for at in some if (made := decide(request[at])).owner is not Owner.UPSTREAM]
        self._decided_at.extend([at for at, _ in found])
        if len(self._decisions) < self._decisions_max:
            self._decisions += found
        of_states = [(at, decision) for at, decision in found if decision.owner is Owner.STATE]
        self._state_key_count += len(of_states)
        if of_states and self._is_write:
            self._drop(of_states)
        self._has_aliases |= any(made.rule is not None and made.rule.alias is not None for _, made in found)

    def _drop(self, of_states: Sequence[tuple[int, Decision]]) -> None:
        """Note which keys' writes are dropped; GenericError for a key whose writes are refused."""
        if self._long_at:
            raise too_long()
        plan = write_plan(self._routed.name, self._request, of_states)
        if plan.refused is not None:
            decision = dict(of_states)[plan.refused]
            raise self._table.refusal(self._request, plan.refused, decision, self._database)
        self._dropped = self._dropped or bytearray(len(self._request))
        self._dropped_count += len(plan.dropped)
        for at in plan.dropped:
            self._dropped[at] = 1

    def route(self) -> Steps[Route]:
        """Return the route, when the owners of all keys are found."""
        table, routed = self._table, self._routed
        # To list the keys of a long write would take too long, so all cached keys count as changed.
        use = _change_of_any(table) if self._is_write else None
        if not self._decisions:
            return self._route_of_upstream(use)
        if self._dropped_count:
            is_all = self._dropped_count == len(self.positions)
            return (yield from _without_dropped(routed, self._request, self._dropped, is_all, use))
        keyed = _KeyedRequest(
            table, routed, self._request, self._database, self.positions, self._decisions, self._long_at
        )
        if self._is_write:
            return keyed.to_upstream()._replace(use=use)
        if self._state_key_count == len(self.positions) and routed.is_served and not self._has_aliases:
            return StatesRoute(routed)
        if routed.is_split:
            return SplitRoute(routed, self._decided_at, is_in_chunks=True)
        return keyed.route()

    def _route_of_upstream(self, change: CachedKeysWrite | None) -> Route:
        """Return the route of a request whose keys are all the upstream's: its reply is not cached."""
        some = self.positions[:SHADOWED_KEYS_MAX]
        route = _KeyedRequest(self._table, self._routed, self._request, self._database, some, (), ()).of_upstream()
        use: ReplyUse = change
        has_exact = self._routed.is_read and self._table.keys.has_exactly_cached
        if type(route.use) is ShadowedRead:
            use = ShadowedRead(route.use.shadowed, None if has_exact else ())
        elif has_exact:
            use = UncachedRead(None)
        return route._replace(use=use)


def _without_dropped(
    routed: OverlayCommand, request: Request, dropped: bytearray, is_all: bool, use: CachedKeysWrite | None
) -> Steps[Route]:
    """Return the route of a long MSET without the keys whose writes are dropped, and their values."""
    if is_all:
        return DroppedRoute(routed)
    left = LongRequest(request[:1], 0)
    for index in range(1, len(request), 2):
        if not dropped[index]:
            left += request[index : index + 2]
        if index % KEYS_AT_ONCE == 1:
            yield
    return UpstreamRoute(routed, left, use=use)


class Router:
    """Has the current routing table, and routes requests by it.

    Args:
        default_database: The upstream's number of the clients' database 0.
    """

    def __init__(
        self,
        table: CommandTable,
        ownership: Ownership,
        allowed: Collection[str] = (),
        answered_here: Collection[str] = (),
        default_database: int = 0,
    ) -> None:
        self.commands = OverlayCommands(table, allowed, answered_here)
        self.getkeys_cache = GetkeysCache()
        self.ownership = ownership
        self._table = RoutingTable(
            self.commands, ownership.matcher, ownership.is_known, self.getkeys_cache, default_database
        )

    @property
    def table(self) -> RoutingTable:
        """The routing table at this time."""
        owners, table = self.ownership, self._table
        if table.keys is not owners.matcher or table.is_known is not owners.is_known:
            table = self._table = table._replace(keys=owners.matcher, is_known=owners.is_known)
        return table

    def route(self, request: Request, database: int = 0) -> Route | None:
        """Return the route of a request, as `route_of`."""
        return route_of(request, self.table, database)

    def route_in_steps(self, request: Request, database: int = 0) -> Steps[Route | None]:
        """Return the route of a request in steps, as `route_in_steps`."""
        return route_in_steps(request, self.table, database)

    def of_states(self, request: Request, at: int, database: int = 0) -> Request:
        """Return a request for states only, as `request_of_states`."""
        return request_of_states(request, at, self.table, database)

    def needs_getkeys(self, request: Request) -> bool:
        """Return whether only COMMAND GETKEYS of the upstream can find the keys of a request."""
        routed = self.commands.of(request)
        return routed is not None and routed.needs_getkeys and not self.getkeys_cache.has(request)


def _cache_use(
    routed: OverlayCommand, request: Request, positions: Sequence[int], decide: Callable[[bytes], Decision]
) -> CacheableRead | UncachedRead | CachedKeysWrite | None:
    """Return the use that the cache has for the upstream's reply to a request.

    A script may change keys that it does not declare. A script without keys counts as one that changes all keys.
    """
    if not routed.is_read:
        if positions:
            return CachedKeysWrite([request[at] for at in positions])
        return None if {"write", "movablekeys"}.isdisjoint(routed.facts.flags) else CachedKeysWrite(None)
    rules = [(at, rule) for at in positions if (rule := decide(request[at]).rule) is not None and rule.cache_s]
    exact = [request[at] for at, rule in rules if rule.is_cached_exactly]
    is_cacheable = rules and len(rules) == len(positions) and "movablekeys" not in routed.facts.flags
    if is_cacheable and routed.policy.is_cacheable and is_comparable(routed.name, routed.facts):
        keys = list(dict.fromkeys(request[at] for at in positions))
        return CacheableRead(keys, min(rule.cache_s for _, rule in rules), exact)
    return UncachedRead(exact) if exact else None


def _shadowed(
    routed: OverlayCommand,
    request: Request,
    positions: Sequence[int],
    decide: Callable[[bytes], Decision],
) -> Sequence[Shadowed]:
    """Return the keys of a read whose values are to be compared: its only key, or the keys of MGET."""
    if not routed.is_served or not is_comparable(routed.name, routed.facts):
        return ()
    if len(positions) > 1 and routed.policy.special is not SpecialCommand.MGET:
        return ()
    found = []
    for number, at in enumerate(positions):
        decided = decide(request[at]).rule
        if decided is None or decided.owner is not Owner.SHADOW:
            continue
        key, is_mget = request[at], routed.policy.special is SpecialCommand.MGET
        alone: Request = (b"GET", key) if is_mget else request
        name = alone[0].lower().decode("latin-1") if is_mget else routed.name
        state_key = decided.state_key_of(key)
        if state_key.field is None:
            read: FieldRead | None = FieldRead(with_state_keys(alone, {1 if is_mget else at: state_key}))
        else:
            read = field_read(name, alone, state_key.key, state_key.field)
        if read is not None:
            found.append(Shadowed(decided, number, key, name, alone, state_key.key, read.request, read.convert))
    return found


def _state_read(routed: OverlayCommand, request: Request, at: int, decision: Decision) -> StateRead:
    """Return the states' part of a read of the key at a position, whose rule is `prefer-state`."""
    assert decision.rule is not None
    state_key = decision.rule.state_key_of(request[at])
    exists = exists_request(state_key)
    if not routed.is_served:
        return StateRead(exists, ())
    if state_key.field is None:
        return StateRead(exists, [with_state_keys(request, {at: state_key})])
    read = field_read(routed.name, request, state_key.key, state_key.field)
    if read is None:
        return StateRead(exists, ())
    return StateRead(exists, [read.request] if read.of_key is None else [read.request, read.of_key], read.convert)


def _state_keys(request: Request, decisions: Sequence[tuple[int, Decision]]) -> Mapping[int, StateKey]:
    """Return the states' keys of the aliases among the keys, by position."""
    found = {}
    for at, decision in decisions:
        if decision.rule is not None and decision.rule.alias is not None:
            found[at] = decision.rule.alias.state_key_of(request[at])
    return found


def _is_nonblocking_read(routed: OverlayCommand, request: Request) -> bool:
    """Return whether a request is an XREAD or an XREADGROUP without BLOCK."""
    if not routed.policy.blocks_by_option:
        return False
    at = 1
    while at < len(request):
        option = request[at].upper()
        if option == b"BLOCK":
            return False
        if option not in STREAM_OPTIONS:
            break  # STREAMS, or a syntax error
        at += STREAM_OPTIONS[option]
    return True
