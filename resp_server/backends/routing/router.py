"""The destination of a request: the states, the upstream, both, or the proxy (or server) itself. Pure.

The keys of a long request are decided in steps, so that other clients are served between them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from resp_server.backends.redis.routed_commands import RoutedCommand, RoutedCommands
from resp_server.backends.routing.cross_db_commands import OtherKey, is_number, other_key
from resp_server.backends.routing.key_aliases import (
    ConvertReplies,
    FieldRead,
    StateName,
    StateRead,
    exists_request,
    field_read,
    with_names,
)
from resp_server.backends.routing.key_matcher import Decision
from resp_server.backends.routing.long_words import long_words, too_long, without_long_words
from resp_server.backends.routing.ownership import Ownership
from resp_server.backends.routing.rules import Owner, Rule, Writes
from resp_server.backends.routing.shadow_compare import is_comparable
from resp_server.backends.routing.state_writes import without_pairs, write_plan
from resp_server.command.keys import key_runs, searches_keyword
from resp_server.command.policy import Destination, Role
from resp_server.command.table import CommandTable
from resp_server.forwarding.raw_replies import Steps
from resp_server.protocol.errors import GenericError, LoadingError, client_text
from resp_server.protocol.request_parser import LongRequest, Request
from resp_server.session.transaction import WATCHED_KEYS_MAX

# Sections of INFO that only this process has.
OWN_SECTIONS = (b"proxy", b"sparkis")
# The words that an option of XREAD and XREADGROUP takes, with its name.
STREAM_OPTIONS = {b"GROUP": 3, b"COUNT": 2, b"NOACK": 1}
NO_FIELDS: Mapping[int, Request] = {}
NO_STATE_READS: Mapping[int, StateRead] = {}
# Keys that are decided in one step (guess: 0.2 ms).
KEYS_AT_ONCE = 256
# Words of a request in which an option has to be found (guess: takes some milliseconds).
SEARCHED_WORDS_MAX = 1 << 15
# Decisions about states' keys that are kept of a long request that is not split: no command on states takes more keys.
OTHERS_MAX = 4097
# Cached replies to COMMAND GETKEYS, and the words of the longest request (guesses: a few MB, and as many as a request
# may have that is not routed in steps).
GETKEYS_CACHED_MAX, GETKEYS_WORDS_MAX = 1024, 1024
# Keys of a long request that are compared with the states' values, where a rule says so (guess: enough to compare).
SHADOWED_KEYS_MAX = 1024
# Keys that an error names.
NAMED_KEYS_MAX = 8


class Route(NamedTuple):
    """The destination of a request, and what it needs for that.

    For `Destination.BOTH`:

    For `Destination.PREFERRED`:

    For `Destination.MAPPED`:

    For `Destination.UPSTREAM`:

    Args:
        state_keys: The positions of the states' keys.
        preferred: The states' reads for keys that the states answer if they have them, by position.
        fields: The requests for keys that are fields of states' keys, by position.
        preferred: The only key.
        unserved: The error if the states have it, but do not serve the command.
        convert: Makes the reply to the client's request of the states' replies to `request` and, if there is one, to
            `of_key`.
        is_blocking: The reply may come much later, so the client needs a connection of its own.
        shadowed: The keys to compare.
        cache_s: How long the reply about `cached_keys` may be cached.
        changed: The keys that the request may change, if any key is cached; None: all keys.
        is_fenced: Its reply may be newer than a reply that is cached exactly, so the cache has to know all changes
            before it.
        request: What the side gets instead of the client's request; None: the client's request.
    """

    destination: Destination
    routed: RoutedCommand
    state_keys: Sequence[int] = ()
    is_blocking: bool = False
    request: Request | None = None
    fields: Mapping[int, Request] = NO_FIELDS
    convert: ConvertReplies | None = None
    of_key: Request | None = None
    preferred: Mapping[int, StateRead] = NO_STATE_READS
    unserved: GenericError | None = None
    shadowed: Sequence[Shadowed] = ()
    cache_s: float = 0.0
    cached_keys: Sequence[bytes] = ()
    changed: Sequence[bytes] | None = ()
    is_fenced: bool = False


class Shadowed(NamedTuple):
    """A key whose value in the upstream is compared with the state's.

    Args:
        at: Its position among the keys.
        name, upstream_request: The read of this key alone.
        request, convert: The state's read, and what makes its reply that of the client's.
    """

    rule: Rule
    at: int
    key: bytes
    name: str
    upstream_request: Request
    state_key: bytes
    request: Request
    convert: ConvertReplies | None = None


class GetkeysCache:
    """Caches the keys that the upstream has returned to COMMAND GETKEYS, by the words of the request."""

    def __init__(self) -> None:
        self._keys: dict[Request, Sequence[bytes]] = {}

    def add(self, request: Request, keys: Sequence[bytes]) -> None:
        """Cache the keys of a request; the oldest entry makes room."""
        if len(self._keys) >= GETKEYS_CACHED_MAX:
            del self._keys[next(iter(self._keys))]
        self._keys[tuple(request)] = keys

    def positions(self, name: str, request: Request) -> Sequence[int]:
        """Return the positions of a request's keys; GenericError if they are not known."""
        words = tuple(request)
        keys = None if len(request) > GETKEYS_WORDS_MAX else self._keys.get(words)
        if keys is None:
            raise GenericError(f"the upstream does not say where the keys of '{name}' are, so it is not passed on")
        return sorted({words.index(key, 1) for key in keys})

    def has(self, request: Request) -> bool:
        """Return whether the keys of a request are known."""
        return tuple(request) in self._keys


class Router:
    """Decides the destination of requests. commands: the facts of each command. getkeys_cache: see `GetkeysCache`.

    Args:
        allowed, own: See `RoutedCommands`.

    Attributes:
        own_database: The upstream's number of the clients' database 0.
    """

    def __init__(
        self, table: CommandTable, ownership: Ownership, allowed: Collection[str] = (), own: Collection[str] = ()
    ) -> None:
        self.commands = RoutedCommands(table, allowed, own)
        self.getkeys_cache = GetkeysCache()
        self.own_database = 0
        self.ownership = ownership

    def route(self, request: Request, database: int = 0) -> Route | None:
        """Return the route of a request; None for an unknown command. ReplyError for a request that no side may answer.

        Args:
            database: The one that the client has selected.
        """
        long_at = long_words(request)
        routed = self.commands.of(request)
        if long_at and (routed is None or routed.destination not in (Destination.BY_KEYS, Destination.UPSTREAM)):
            raise too_long()
        if long_at:
            request = without_long_words(request, long_at)
        if routed is None:
            return None
        if routed.destination is Destination.BY_KEYS:
            self._check_known()
            if routed.single_key_at and routed.single_key_at < len(request):
                positions: Sequence[int] = (routed.single_key_at,)
            else:
                positions = self._positions(routed, request)
            if routed.policy.writes_other_database and (other := other_key(routed.name, request)) is not None:
                return self._over_databases(routed, request, other, database)
            decide = self.ownership.matcher.decider(database) if database else self.ownership.decide
            others = [(at, found) for at in positions if (found := decide(request[at])).owner is not Owner.UPSTREAM]
            return self._by_keys(routed, request, positions, others, database, long_at)
        if routed.destination is Destination.ALL_KEYS:
            self._check_known()
            if routed.command is not None:
                routed.command.check_arity(request)
            return Route(Destination.ALL_KEYS, routed)
        if routed.destination is Destination.DENIED:
            raise GenericError(
                f"command '{routed.name}' is not passed on to the upstream: send it to the upstream's own address"
            )
        if routed.destination is Destination.BY_SECTIONS:
            is_own = any(word.lower() in OWN_SECTIONS for word in request[1:])
            return Route(Destination.LOCAL if is_own else Destination.UPSTREAM, routed)
        if routed.policy.role is Role.SWAPDB:
            self._check_swap(request)
        may_change = (
            self.ownership.has_cached and routed.destination is Destination.UPSTREAM and "write" in routed.facts.flags
        )
        is_blocking = routed.destination is Destination.UPSTREAM and (
            "blocking" in routed.facts.flags or routed.policy.waits_for_writes or routed.is_subscription
        )
        return Route(routed.destination, routed, is_blocking=is_blocking, changed=None if may_change else ())

    def needs_getkeys(self, request: Request) -> bool:
        """Return whether only COMMAND GETKEYS of the upstream can find the keys of a request."""
        routed = self.commands.of(request)
        return routed is not None and routed.needs_getkeys and not self.getkeys_cache.has(request)

    def route_in_steps(self, request: Request, database: int = 0) -> Steps[Route | None]:
        """Return the route of a request, in steps if it is long. A long read of both sides gets `PORTIONS`."""
        long_at = long_words(request)
        routed = self.commands.of(request)
        if (
            routed is None
            or routed.destination is not Destination.BY_KEYS
            or routed.single_key_at
            or len(request) <= KEYS_AT_ONCE
        ):
            return self.route(request, database)
        self._check_known()
        if long_at:
            request = without_long_words(request, long_at)
        if len(request) > SEARCHED_WORDS_MAX and searches_keyword(routed.facts):
            raise GenericError(
                f"'{routed.name}' takes {SEARCHED_WORDS_MAX} arguments through --upstream; split the request"
            )
        positions = self._positions(routed, request, is_long=True)
        if routed.policy.role is Role.WATCH and len(positions) > WATCHED_KEYS_MAX:
            raise GenericError(f"a client may watch {WATCHED_KEYS_MAX} keys; UNWATCH, or watch fewer")
        if any(at in positions for at in long_at):
            raise too_long()
        decide = self.ownership.matcher.decider(database)
        # An array, because to free a million tuples would take too long.
        others_at = array("L")
        others: list[tuple[int, Decision]] = []  # the first of them
        dropped, owned_count, dropped_count, has_names = bytearray(), 0, 0, False
        for first in range(0, len(positions), KEYS_AT_ONCE):
            some = positions[first : first + KEYS_AT_ONCE]
            found = [(at, made) for at in some if (made := decide(request[at])).owner is not Owner.UPSTREAM]
            others_at.extend([at for at, _ in found])
            if len(others) < (WATCHED_KEYS_MAX if routed.policy.role is Role.WATCH else OTHERS_MAX):
                others += found
            owned = [(at, decision) for at, decision in found if decision.owner is Owner.STATE]
            owned_count += len(owned)
            if owned and not routed.is_read and routed.policy.role is not Role.WATCH:
                if long_at:
                    raise too_long()
                plan = write_plan(routed.name, request, owned)
                if plan.refused is not None:
                    raise self._refusal(request, plan.refused, dict(owned)[plan.refused], database)
                dropped = dropped or bytearray(len(request))
                dropped_count += len(plan.dropped)
                for at in plan.dropped:
                    dropped[at] = 1
            has_names = has_names or any(made.rule is not None and made.rule.mapping is not None for _, made in found)
            yield
        # To list the keys of a long write would take too long, so all cached keys count as changed.
        changed = (
            None if self.ownership.has_cached and not routed.is_read and routed.policy.role is not Role.WATCH else ()
        )
        if not others:
            route = self._by_keys(routed, request, positions[:SHADOWED_KEYS_MAX], others, database, ())
            is_fenced = routed.is_read and self.ownership.has_exactly_cached
            return route._replace(changed=changed, is_fenced=is_fenced, cache_s=0.0)
        if dropped_count:
            route = yield from _without_dropped(routed, request, dropped, dropped_count == len(positions))
            return route._replace(changed=changed)
        if not routed.is_read and routed.policy.role is not Role.WATCH:
            return self._to_upstream(routed, request)._replace(changed=changed)
        is_served = routed.command is not None and routed.command.handler is not None
        if owned_count == len(positions) and is_served and not has_names:
            return Route(Destination.STATES, routed)
        if routed.is_split:
            return Route(Destination.PORTIONS, routed, others_at)
        return self._by_keys(routed, request, positions, others, database, long_at)

    def _over_databases(self, routed: RoutedCommand, request: Request, other: OtherKey, database: int) -> Route:
        """Return the route of a MOVE or COPY to another database: the first key is in the selected one."""
        number = self._client_number(other.number)
        found = self.ownership.matcher.decider(number)(request[other.at])
        if found.owner is Owner.STATE and write_plan(routed.name, request, [(other.at, found)]).refused is not None:
            raise self._refusal(request, other.at, found, number)
        source = self.ownership.matcher.decider(database)(request[1])
        others = [] if source.owner is Owner.UPSTREAM else [(1, source)]
        route = self._by_keys(routed, request, (1,), others, database, ())
        return route._replace(changed=None if self.ownership.has_cached else ())

    def _check_swap(self, request: Request) -> None:
        """Raise GenericError for a SWAPDB that would put keys of the upstream under the names of states' keys."""
        self._check_known()
        for word in request[1:3]:
            if is_number(word) and self.ownership.matcher.has_states(self._client_number(int(word))):
                raise GenericError(
                    f"database {int(word)} has keys of states, which would hide the upstream's; use others"
                )

    def _client_number(self, number: int) -> int:
        """Return the number by which clients select a database of the upstream. -1: they cannot."""
        return 0 if number == self.own_database else number or -1

    def _by_keys(
        self,
        routed: RoutedCommand,
        request: Request,
        positions: Sequence[int],
        others: Sequence[tuple[int, Decision]],
        database: int,
        long_at: Collection[int],
    ) -> Route:
        """Return the route of a request with keys.

        Args:
            others: The positions and decisions of keys that states may have.
        """
        if long_at and not set(long_at).isdisjoint(positions):
            raise too_long()
        owned = [(at, decision) for at, decision in others if decision.owner is Owner.STATE]
        if not others:
            route = self._to_upstream(routed, request)
            if self.ownership.has_cached and not (long_at and routed.is_read):
                route = _cached(route, request, positions, self.ownership.matcher.decider(database))
            if not self.ownership.has_shadows or not routed.is_read or route.is_blocking:
                return route
            return route._replace(
                shadowed=_shadowed(routed, request, positions, self.ownership.matcher.decider(database))
            )
        if long_at:
            raise too_long()
        if routed.command is not None:
            routed.command.check_arity(request)
        if routed.policy.role is Role.WATCH and len(owned) < len(positions):
            return self._both(routed, request, others)
        if len(owned) < len(others) and routed.is_read:
            return self._preferred(routed, request, positions, others, database)
        if not owned:
            return self._changing(self._to_upstream(routed, request), request, positions)
        if not routed.is_read and routed.policy.role is not Role.WATCH:
            return self._write(routed, request, positions, owned, database)
        is_served = routed.command is not None and routed.command.handler is not None
        if len(owned) == len(positions) and is_served:
            return self._states(routed, request, owned, database)
        if routed.is_split:
            return self._both(routed, request, owned)
        if len(owned) < len(positions):
            raise GenericError(
                f"command '{routed.name}' needs its keys on one side: {self._owners_text(request, positions, database)}"
            )
        raise GenericError(self._owners_text(request, [owned[0][0]], database))

    def of_states(self, request: Request, at: int, database: int = 0) -> Request:
        """Return a request that only states answer, with the state's name of its key; GenericError for another key."""
        self._check_known()
        found = self.ownership.matcher.decider(database)(request[at])
        names = _state_names(request, [(at, found)])
        is_upstreams = found.owner is Owner.UPSTREAM
        if is_upstreams or (at in names and names[at].field is not None):
            what = "keys of the upstream" if is_upstreams else "fields of a state's key"
            name = b" ".join(request[:at]).decode("utf-8", "replace").upper()
            raise GenericError(f"{name} is not available for {what}: {self._owners_text(request, [at], database)}")
        return with_names(request, names)

    def _preferred(
        self,
        routed: RoutedCommand,
        request: Request,
        positions: Sequence[int],
        others: Sequence[tuple[int, Decision]],
        database: int,
    ) -> Route:
        """Return the route of a read with keys that the states answer if they have them."""
        if "blocking" in routed.facts.flags and not _is_nonblocking_read(routed, request):
            raise GenericError(
                f"command '{routed.name}' cannot block: {self._owners_text(request, positions, database)}"
            )
        if len(positions) == 1:
            ((at, found),) = others
            read = _state_read(routed, request, at, found)
            unserved = None
            if not read.reads:
                unserved = GenericError(f"{self._owners_text(request, positions, database)}, and the states have it")
            return Route(Destination.PREFERRED, routed, preferred={at: read}, unserved=unserved)
        if not routed.is_split:
            raise GenericError(
                f"command '{routed.name}' needs its keys on one side: {self._owners_text(request, positions, database)}"
            )
        return self._both(routed, request, others)

    def _states(
        self, routed: RoutedCommand, request: Request, owned: Sequence[tuple[int, Decision]], database: int
    ) -> Route:
        """Return the route of a request with keys of states only."""
        names = _state_names(request, owned)
        if not names:
            return Route(Destination.STATES, routed)
        if routed.policy.role is Role.WATCH or all(name.field is None for name in names.values()):
            return Route(Destination.MAPPED, routed, request=with_names(request, names))
        if routed.is_split and len(owned) > 1:
            return self._both(routed, request, owned)
        (at, name), *others = names.items()
        read = None if others or name.field is None else field_read(routed.name, request, name.key, name.field)
        if read is None:
            raise GenericError(
                f"command '{routed.name}' is not available for fields of a state's key: "
                f"{self._owners_text(request, [at], database)}"
            )
        return Route(Destination.MAPPED, routed, request=read.request, convert=read.convert, of_key=read.of_key)

    def _both(self, routed: RoutedCommand, request: Request, others: Sequence[tuple[int, Decision]]) -> Route:
        """Return the route of a request that is split.

        Args:
            others: As in `_by_keys`.
        """
        owned = [at for at, found in others if found.owner is Owner.STATE]
        preferred = {
            at: _state_read(routed, (request[0], request[at]), 1, found)
            for at, found in others
            if found.owner is Owner.PREFER_STATE
        }
        of_states = [(at, found) for at, found in others if at not in preferred]
        names, is_fenced = _state_names(request, of_states), self.ownership.has_exactly_cached
        if not names:
            return Route(Destination.BOTH, routed, owned, preferred=preferred, is_fenced=is_fenced)
        fields = {}
        for at, (key, field) in names.items():
            read = (
                None
                if field is None or routed.policy.role is Role.WATCH
                else field_read(routed.name, request, key, field)
            )
            if read is not None:
                fields[at] = read.request
        owned = [at for at in owned if at not in fields]
        named = with_names(request, names)
        return Route(
            Destination.BOTH, routed, owned, preferred=preferred, request=named, fields=fields, is_fenced=is_fenced
        )

    def _to_upstream(self, routed: RoutedCommand, request: Request) -> Route:
        is_blocking = "blocking" in routed.facts.flags and not _is_nonblocking_read(routed, request)
        return Route(Destination.UPSTREAM, routed, is_blocking=is_blocking)

    def _write(
        self,
        routed: RoutedCommand,
        request: Request,
        positions: Sequence[int],
        owned: Sequence[tuple[int, Decision]],
        database: int,
    ) -> Route:
        plan = write_plan(routed.name, request, owned)
        if plan.refused is not None:
            raise self._refusal(request, plan.refused, dict(owned)[plan.refused], database)
        if not plan.dropped:
            return self._changing(self._to_upstream(routed, request), request, positions)
        if len(plan.dropped) == len(positions):
            return Route(Destination.DROPPED, routed)
        return self._changing(
            Route(Destination.UPSTREAM, routed, request=without_pairs(request, plan.dropped)), request, positions
        )

    def _changing(self, route: Route, request: Request, positions: Sequence[int]) -> Route:
        """Return a write's route with the keys that the write may change, if any key is cached."""
        if not self.ownership.has_cached:
            return route
        return route._replace(changed=[request[at] for at in positions])

    def _refusal(self, request: Request, at: int, decision: Decision, database: int) -> GenericError:
        """Return the error of a write with a state's key."""
        text, rule = self._owners_text(request, [at], database), decision.rule
        if rule is not None and rule.writes is Writes.DROP:
            text += f"; the rule '{rule.name}' drops plain SET, SETEX, PSETEX and MSET only"
        return GenericError(text)

    def _owners_text(self, request: Request, positions: Sequence[int], database: int) -> str:
        named = [request[at] for at in positions[:NAMED_KEYS_MAX]]
        return ", ".join(f"key '{client_text(key)}' is {self.ownership.owner_text(key, database)}" for key in named)

    def _check_known(self) -> None:
        if not self.ownership.is_known:
            raise LoadingError("the key formats of the states are not known yet; retry in a moment")

    def _positions(self, routed: RoutedCommand, request: Request, *, is_long: bool = False) -> Sequence[int]:
        """Return the positions of keys, sorted unless `is_long`: to sort many would take too long."""
        if routed.needs_getkeys:
            return self.getkeys_cache.positions(routed.name, request)
        runs = [positions for positions, flags in key_runs(routed.facts, request) or () if "not_key" not in flags]
        if len(runs) == 1:
            return runs[0]
        return [at for run in runs for at in run] if is_long else sorted({at for run in runs for at in run})


def _without_dropped(routed: RoutedCommand, request: Request, dropped: bytearray, is_all: bool) -> Steps[Route]:
    """Return the route of a long MSET without the keys whose writes are dropped, and their values."""
    if is_all:
        return Route(Destination.DROPPED, routed)
    left = LongRequest(request[:1], 0)
    for at in range(1, len(request), 2):
        if not dropped[at]:
            left += request[at : at + 2]
        if at % KEYS_AT_ONCE == 1:
            yield
    return Route(Destination.UPSTREAM, routed, request=left)


def _cached(route: Route, request: Request, positions: Sequence[int], decide: Callable[[bytes], Decision]) -> Route:
    """Return the route of an upstream's request with the time for which its reply may be cached, or the changed keys.

    A read of a key that is cached exactly has the key among them for EXEC, which caches no replies. A script may change
    keys that it does not declare. A script without keys counts as one that changes all keys.
    """
    routed = route.routed
    if not routed.is_read:
        may_change_any = not positions and not {"write", "movablekeys"}.isdisjoint(routed.facts.flags)
        return route._replace(changed=None if may_change_any else [request[at] for at in positions])
    rules = [(at, rule) for at in positions if (rule := decide(request[at]).rule) is not None and rule.cache_s]
    exact = [request[at] for at, rule in rules if rule.is_cached_exactly]
    if exact:
        route = route._replace(changed=exact, is_fenced=True)
    if not rules or len(rules) < len(positions) or "movablekeys" in routed.facts.flags:
        return route
    if not routed.policy.is_cacheable or not is_comparable(routed.name, routed.facts):
        return route
    keys = list(dict.fromkeys(request[at] for at in positions))
    return route._replace(cache_s=min(rule.cache_s for _, rule in rules), cached_keys=keys)


def _shadowed(
    routed: RoutedCommand,
    request: Request,
    positions: Sequence[int],
    decide: Callable[[bytes], Decision],
) -> Sequence[Shadowed]:
    """Return the keys of a read whose values are to be compared: its only key, or the keys of MGET."""
    is_served = routed.command is not None and routed.command.handler is not None
    if not is_served or not is_comparable(routed.name, routed.facts):
        return ()
    if len(positions) > 1 and routed.policy.role is not Role.MGET:
        return ()
    found = []
    for number, at in enumerate(positions):
        decided = decide(request[at]).rule
        if decided is None or decided.owner is not Owner.SHADOW:
            continue
        key, is_mget = request[at], routed.policy.role is Role.MGET
        alone: Request = (b"GET", key) if is_mget else request
        name = alone[0].lower().decode("latin-1") if is_mget else routed.name
        state_name = decided.state_name_of(key)
        if state_name.field is None:
            read: FieldRead | None = FieldRead(with_names(alone, {1 if is_mget else at: state_name}))
        else:
            read = field_read(name, alone, state_name.key, state_name.field)
        if read is not None:
            found.append(Shadowed(decided, number, key, name, alone, state_name.key, read.request, read.convert))
    return found


def _state_read(routed: RoutedCommand, request: Request, at: int, decision: Decision) -> StateRead:
    """Return the states' part of a read of the key at a position, whose rule is `prefer-state`."""
    assert decision.rule is not None
    name = decision.rule.state_name_of(request[at])
    exists = exists_request(name)
    if routed.command is None or routed.command.handler is None:
        return StateRead(exists, ())
    if name.field is None:
        return StateRead(exists, [with_names(request, {at: name})])
    read = field_read(routed.name, request, name.key, name.field)
    if read is None:
        return StateRead(exists, ())
    return StateRead(exists, [read.request] if read.of_key is None else [read.request, read.of_key], read.convert)


def _state_names(request: Request, others: Sequence[tuple[int, Decision]]) -> Mapping[int, StateName]:
    """Return the states' names of the keys that clients know by another name, by position."""
    found = {}
    for at, decision in others:
        if decision.rule is not None and decision.rule.mapping is not None:
            found[at] = decision.rule.mapping.state_name_of(request[at])
    return found


def _is_nonblocking_read(routed: RoutedCommand, request: Request) -> bool:
    """Return whether a request is an XREAD or an XREADGROUP without BLOCK."""
    if not routed.policy.blocks_by_option:
        return False
    at = 1
    while at < len(request):
        word = request[at].upper()
        if word == b"BLOCK":
            return False
        if word not in STREAM_OPTIONS:
            break  # STREAMS, or a syntax error
        at += STREAM_OPTIONS[word]
    return True
