"""Which nodes of a Redis Cluster get a client's SUBSCRIBE, UNSUBSCRIBE or MONITOR.

    channels                    one node: each node sends the messages of all channels
    notifications, MONITOR      all masters: each node sends those of its own keys and requests only
    channels of shards          the master of the channel's slot

A pattern may match channels and notifications. All masters get it, and messages of channels are taken from one node.
A single Redis gets each request unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from resp_server.backends.redis.pool import UpstreamPool
from resp_server.backends.redis.upstream import Upstream
from resp_server.command.policies import policy_of
from resp_server.command.policy import SpecialCommand, Verb
from resp_server.protocol.request_parser import Request
from resp_server.push.keyspace_notifications import may_match_notifications
from resp_server.session.session import Session
from resp_server.session.subscriptions import SubscriptionKind
from state_backend.model.slots import slot_of


def subscribes(name: str) -> bool:
    """Return whether a command subscribes its client to channels."""
    channels = policy_of(name).channels
    return channels is not None and channels.verb is Verb.SUBSCRIBE


def kind_of(name: str) -> SubscriptionKind:
    """Return the kind of channels of a command that subscribes or unsubscribes."""
    channels = policy_of(name).channels
    assert channels is not None
    return SubscriptionKind(channels.kind)


class SubscriptionPart(NamedTuple):
    """A request for one node.

    Args:
        is_main: This node sends channels' messages.
        is_at_all_masters: A master that joins later would have to get the request, too.
    """

    pool: UpstreamPool
    request: Request
    confirmations: int
    is_main: bool = False
    is_at_all_masters: bool = False


def parts_of(
    name: str, request: Request, session: Session, upstream: Upstream, main: UpstreamPool
) -> Sequence[SubscriptionPart]:
    """Return the requests for each node; ReplyError if the node of a slot is not known."""
    if not upstream.url.is_cluster:
        return [SubscriptionPart(main, request, _confirmations(name, request, session), True)]
    if policy_of(name).special is SpecialCommand.MONITOR:
        return [SubscriptionPart(master, request, 0, master is main, True) for master in upstream.masters]
    names = request[1:] or _subscribed(name, session)
    kind = kind_of(name)
    if kind is SubscriptionKind.SHARD:
        return _of_shards(name, request[0], names, session, upstream)
    of_keys = [each for each in names if may_match_notifications(kind, each)]
    parts = [SubscriptionPart(main, (request[0], *names), len(names), True, bool(of_keys))] if names else []
    others = [master for master in upstream.masters if master is not main] if of_keys else []
    parts += [SubscriptionPart(each, (request[0], *of_keys), len(of_keys), False, True) for each in others]
    return parts if subscribes(name) else [part for part in parts if _listens(part.pool, session)]


def _of_shards(
    name: str, word: bytes, channels: Sequence[bytes], session: Session, upstream: Upstream
) -> Sequence[SubscriptionPart]:
    """Return a request for each slot: a node refuses channels of several slots in one."""
    by_slot: dict[int, list[bytes]] = {}
    for channel in channels:
        by_slot.setdefault(slot_of(channel), []).append(channel)
    pools = {slot: upstream.pool_of_slot(slot) for slot in by_slot}
    return [
        SubscriptionPart(pools[slot], (word, *some), len(some))
        for slot, some in by_slot.items()
        if subscribes(name) or _listens(pools[slot], session)
    ]


def _listens(pool: UpstreamPool, session: Session) -> bool:
    connection = pool.dedicated.get(session.id)
    return connection is not None and connection.is_listening


def _subscribed(name: str, session: Session) -> Sequence[bytes]:
    return () if session.subscriptions is None else list(session.subscriptions.by_kind[kind_of(name)])


def _confirmations(name: str, request: Request, session: Session) -> int:
    """Return how many frames confirm a request."""
    if policy_of(name).special is SpecialCommand.MONITOR:
        return 0
    return len(request) - 1 or max(1, len(_subscribed(name, session)))
