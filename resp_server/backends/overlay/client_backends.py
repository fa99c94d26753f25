"""Sends requests about all keys to each backend, and filters the keys that a user sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from resp_server.backends.overlay.keyspace import ListingFilter
from resp_server.backends.overlay.state_listing import ToOwner
from resp_server.backends.redis.upstream import Upstream
from resp_server.backends.routing.key_aliases import StateKey
from resp_server.backends.routing.key_matcher import Decision
from resp_server.backends.routing.ownership import Ownership
from resp_server.backends.routing.rules import Owner, Rule
from resp_server.backends.servers.field_names import FieldRules, has_fields
from resp_server.backends.servers.keyspace_queries import KeyspaceQuery
from resp_server.backends.servers.request_split import within
from resp_server.backends.servers.state_clusters import StateClusters
from resp_server.command.policies import special_of
from resp_server.command.policy import SpecialCommand
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.answers import ReadSeenEpochs, run_into
from resp_server.raw_replies.reply_sinks import Defer, ReplySink
from resp_server.raw_replies.reply_splitter import pack
from resp_server.session.account import Account
from resp_server.session.session import Session

# The replies of states that have no keys.
NO_KEYS = {
    SpecialCommand.SCAN: b"*2\r\n$1\r\n0\r\n*0\r\n",
    SpecialCommand.KEYS: b"*0\r\n",
    SpecialCommand.RANDOMKEY: b"$-1\r\n",
    SpecialCommand.DBSIZE: b":0\r\n",
}


def visible_keys(ownership: Ownership, user: Account, database: int) -> ListingFilter:
    """Return the filter of the keys that a user sees in SCAN, KEYS and RANDOMKEY."""
    decide = ownership.matcher.decider(database)

    def of_states(key: bytes) -> bool:
        return decide(key).owner is not Owner.UPSTREAM

    def of_upstream(key: bytes) -> bool:
        return decide(key).owner is not Owner.STATE

    has_common = any(rule.owner is Owner.PREFER_STATE for rule in ownership.rules)
    aliased = [rule for rule in ownership.rules if rule.database == database and rule.lists_aliases]
    if aliased:
        names_of = partial(_names_of, decide, [rule for rule in aliased if not has_fields(rule)], user)
        fields = FieldRules([rule for rule in aliased if has_fields(rule)], ownership.matcher.decider)
        return ListingFilter(
            lambda key: of_upstream(key) and user.can_read(key), names_of, has_common, True, fields, user.can_read
        )
    if user.reads_all_keys:
        return ListingFilter(of_upstream, of_states, has_common)
    # State servers check which keys the user may read.
    return ListingFilter(lambda key: of_upstream(key) and user.can_read(key), of_states, has_common)


def _names_of(
    decide: Callable[[bytes], Decision], aliased: Sequence[Rule], user: Account, state_key: bytes
) -> Sequence[bytes]:
    """Return the names by which clients know a state's key: its own, unless a rule has it, and those of rules."""
    own = decide(state_key)
    names = [state_key] if own.owner is not Owner.UPSTREAM and (own.rule is None or own.rule.alias is None) else []
    for rule in aliased:
        name = rule.alias.key_of(StateKey(state_key, None)) if rule.alias is not None else None
        if name is not None and decide(name).rule is rule:
            names.append(name)
    return [name for name in names if user.can_read(name)]


class ClientBackends:
    """Sends one client's requests about all keys to each backend."""

    def __init__(
        self,
        upstream: Upstream,
        clusters: StateClusters,
        session: Session,
        seen: ReadSeenEpochs,
        defer: Defer,
        to_owner: ToOwner,
        *,
        database: int,
        has_states: bool,
        is_named: bool,
    ) -> None:
        self._upstream, self._clusters, self._session, self._seen = upstream, clusters, session, seen
        self._database, self._has_states, self._is_named = database, has_states, is_named
        self.node_count = upstream.node_count
        self.defer, self.to_owner = defer, to_owner

    def to_node(self, node: int, request: Request, sink: ReplySink, index: int) -> None:
        """Send a read to a node of the upstream."""
        session = self._session
        self._upstream.send_to_node(node, session.id, session.protocol, pack(request), sink, index)

    def to_states(self, request: Request, sink: ReplySink, index: int) -> None:
        """Send a request to all state servers, or for SCAN to that of the cursor."""
        session, special = self._session, special_of(request[0])
        # Counting states' keys in a database other than 0 would mean reading all their names.
        assert special is not None
        if not self._has_states or (self._database and special is SpecialCommand.DBSIZE):
            sink.put(index, NO_KEYS[special])
            return
        # State servers check which keys the user may read, but do not know their other names.
        readable = () if self._is_named else within(session.user)
        query = KeyspaceQuery(self._clusters, request, session.protocol, self._seen, readable)
        run_into(query.answer(), sink, index)
