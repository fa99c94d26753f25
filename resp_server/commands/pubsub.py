"""SUBSCRIBE, PUBLISH, PUBSUB, and STATE PUBLISH and STATE NOTIFY, which proxies and other nodes use."""

from __future__ import annotations

import asyncio
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from resp_server.command.handler import OneOrMore, command, worker_query
from resp_server.command.spec import argument, our_facts
from resp_server.commands.sliced_reply import batched, reply_chunks, sliced_reply
from resp_server.pipeline.context import CommandContext, ServerContext
from resp_server.protocol.errors import GenericError
from resp_server.protocol.glob import matcher
from resp_server.protocol.replies import OK, Frames, Pending, Reply, Sliced
from resp_server.push.message_bus import POST, post_of
from resp_server.push.pubsub import VERBS
from resp_server.session.session import RESP2, RESP3
from resp_server.session.subscriptions import CHANNEL, PATTERN, SHARD, SubscriptionKind, subscription_reply
from resp_server.settings.event_classes import ClassesError, classes_of

# Channel names of a reply that is made at once (guess: well below a millisecond); more are sent in steps.
NAMES_AT_ONCE = 1_024
# The replies to UNSUBSCRIBE and the like, without names, to clients that have no subscriptions.
NOT_SUBSCRIBED = {
    (kind, protocol): Frames(subscription_reply(verbs[1], None, 0, protocol))
    for kind, verbs in VERBS.items()
    for protocol in (RESP2, RESP3)
}
# The next turn of the event loop has begun by then, on any machine that works (guess).
NEXT_TURN_S_MAX = 60.0
# Bytes of channel names that one process sends to another.
NAMES_BYTES_MAX = 8 << 20


@command("subscribe")
def subscribe(context: CommandContext, *channels: OneOrMore) -> Reply:
    """Listens for messages published to channels."""
    return _subscribe(context, CHANNEL, channels)


@command("psubscribe")
def psubscribe(context: CommandContext, *patterns: OneOrMore) -> Reply:
    """Listens for messages published to channels that match one or more patterns."""
    return _subscribe(context, PATTERN, patterns)


@command("ssubscribe")
def ssubscribe(context: CommandContext, *channels: OneOrMore) -> Reply:
    """Listens for messages published to shard channels."""
    return _subscribe(context, SHARD, channels)


@command("unsubscribe")
def unsubscribe(context: CommandContext, *channels: bytes) -> Reply:
    """Stops listening to messages posted to channels."""
    return _unsubscribe(context, CHANNEL, channels)


@command("punsubscribe")
def punsubscribe(context: CommandContext, *patterns: bytes) -> Reply:
    """Stops listening to messages published to channels that match one or more patterns."""
    return _unsubscribe(context, PATTERN, patterns)


@command("sunsubscribe")
def sunsubscribe(context: CommandContext, *channels: bytes) -> Reply:
    """Stops listening to messages posted to shard channels."""
    return _unsubscribe(context, SHARD, channels)


def _subscribe(context: CommandContext, kind: SubscriptionKind, names: Sequence[bytes]) -> Reply:
    message_bus = context.server.message_bus
    return message_bus.subscription_reply(context.session, message_bus.pubsub.subscribe(context.session, kind, names))


def _unsubscribe(context: CommandContext, kind: SubscriptionKind, names: Sequence[bytes]) -> Reply:
    message_bus = context.server.message_bus
    subscribed = context.session.subscriptions
    if not names and subscribed is None and not context.session.replies_suppressed:
        return NOT_SUBSCRIBED[kind, context.session.protocol]
    if not names and subscribed is not None and len(subscribed.by_kind[kind]) > NAMES_AT_ONCE:
        return Sliced(
            _unsubscribing(context, kind, list(subscribed.by_kind[kind])), lambda: None, Frames, has_effect=True
        )
    return message_bus.subscription_reply(context.session, message_bus.pubsub.unsubscribe(context.session, kind, names))


def _unsubscribing(
    context: CommandContext, kind: SubscriptionKind, names: Sequence[bytes]
) -> Iterator[Sequence[Reply]]:
    for batch in batched(names, NAMES_AT_ONCE):
        reply = _unsubscribe(context, kind, batch)
        yield [reply.make() if isinstance(reply, Pending) else reply]  # an unsubscription needs no other process


@command("publish")
def publish(context: CommandContext, channel: bytes, message: bytes) -> Reply:
    """Posts a message to a channel."""
    return context.server.message_bus.publish(context.session, CHANNEL, channel, message)


@command("spublish")
def spublish(context: CommandContext, channel: bytes, message: bytes) -> Reply:
    """Post a message to a shard channel"""
    return context.server.message_bus.publish(context.session, SHARD, channel, message)


@command(
    "state|publish",
    ours=our_facts(
        "O(N+M) where N is the number of subscribed clients and M of subscribed patterns",
        "pubsub loading stale fast",
        "@pubsub @fast",
        {
            "name": "kind",
            "type": "oneof",
            "arguments": [{"name": each.lower(), "type": "pure-token", "token": each} for each in ("CHANNEL", "SHARD")],
        },
        argument("name"),
        argument("message"),
    ),
)
def state_publish(context: CommandContext, kind: bytes, name: bytes, message: bytes) -> Reply:
    """Posts a message to this node's clients only, on behalf of another node of the cluster."""
    kinds = {b"CHANNEL": CHANNEL, b"SHARD": SHARD}
    if kind.upper() not in kinds:
        raise GenericError("STATE PUBLISH is for CHANNEL or SHARD")
    return context.server.message_bus.publish(context.session, kinds[kind.upper()], name, message, is_forwarded=False)


@command(
    "state|notify",
    ours=our_facts("O(1)", "pubsub loading stale fast no_multi", "@pubsub @fast", argument("classes")),
)
def state_notify(context: CommandContext, letters: bytes) -> Reply:
    """Sends this connection keyspace events of these classes, whatever notify-keyspace-events is."""
    try:
        context.server.notifications.enable_for(context.session, classes_of(letters.decode("latin-1")))
    except ClassesError as error:
        raise GenericError(str(error)) from None
    # The event loop writes to the appliers' pipes at the end of its turn. The reply comes after it: an epoch that is
    # committed once the client has it finds an applier that was told to record events.
    reply = Pending(NEXT_TURN_S_MAX, lambda: OK)
    asyncio.get_running_loop().call_soon(reply.resolve, lambda: OK)
    return reply


@worker_query(POST)
def post(server: ServerContext, argument: dict[str, str]) -> Reply:
    """Send a message to the clients of this process; return how many got it."""
    return post_of(server.message_bus, argument)


@command("pubsub|channels")
def pubsub_channels(context: CommandContext, pattern: bytes = b"*") -> Reply:
    """Returns the active channels."""
    return _active_channels(context, CHANNEL, pattern)


@command("pubsub|shardchannels")
def pubsub_shardchannels(context: CommandContext, pattern: bytes = b"*") -> Reply:
    """Returns the active shard channels."""
    return _active_channels(context, SHARD, pattern)


@command("pubsub|numsub")
def pubsub_numsub(context: CommandContext, *channels: bytes) -> Reply:
    """Returns a count of subscribers to channels."""
    return _subscriber_counts(context, CHANNEL, channels)


@command("pubsub|shardnumsub")
def pubsub_shardnumsub(context: CommandContext, *channels: bytes) -> Reply:
    """Returns the count of subscribers of shard channels."""
    return _subscriber_counts(context, SHARD, channels)


@command("pubsub|numpat")
def pubsub_numpat(context: CommandContext) -> Reply:
    """Returns a count of unique pattern subscriptions."""
    return _gather_names(context, PATTERN, len)


@command("pubsub|help")
def pubsub_help(context: CommandContext) -> Reply:
    """Returns helpful text about the different subcommands."""
    return context.server.table.help("pubsub")


def _active_channels(context: CommandContext, kind: SubscriptionKind, pattern: bytes) -> Reply:
    matches = _matcher(context, pattern)
    pubsub = context.server.message_bus.pubsub
    if context.server.workers is None and len(pubsub.names(kind)) > NAMES_AT_ONCE:
        active = (name for name in list(pubsub.names(kind)) if matches(name))
        return sliced_reply(context, lambda view: reply_chunks(active))
    return _gather_names(context, kind, lambda names: [name for name in names if matches(name)])


def _matcher(context: CommandContext, pattern: bytes) -> Callable[[bytes], object]:
    """Return a predicate: a channel matches the pattern, and the client's user may subscribe to it."""
    matches, user = matcher(pattern), context.user
    return lambda name: matches(name) and user.can_subscribe(name)


def _gather_names(
    context: CommandContext, kind: SubscriptionKind, make_reply: Callable[[Collection[bytes]], Reply]
) -> Reply:
    """Gather the subscribed names of one kind from all processes, and make a reply of them."""
    if context.server.workers is None:
        return make_reply(context.server.message_bus.pubsub.names(kind))

    def merge(responses: Sequence[list[str] | None]) -> Reply:
        if None in responses:
            raise GenericError(
                f"the channel names of one process have more than {NAMES_BYTES_MAX} bytes; ask for counts instead"
            )
        return make_reply(dict.fromkeys(b64decode(name) for names in responses for name in names or ()))

    return context.server.gather(subscribed_names, kind.value.decode(), merge)


def _subscriber_counts(context: CommandContext, kind: SubscriptionKind, names: Sequence[bytes]) -> Reply:
    def merge(responses: Sequence[list[int]]) -> Reply:
        counts = map(sum, zip(*responses, strict=True))
        return [argument for pair in zip(names, counts, strict=True) for argument in pair]

    if context.server.workers is None:
        pubsub = context.server.message_bus.pubsub
        return [argument for name in names for argument in (name, pubsub.count(kind, name))]
    texts = [b64encode(name).decode() for name in names]
    return context.server.gather(subscriber_counts, {"kind": kind.value.decode(), "names": texts}, merge)


@worker_query("subscribed names")
def subscribed_names(server: ServerContext, kind: str) -> list[str] | None:
    """Return the names of one kind that this process's clients are subscribed to; None: too many bytes."""
    names = server.message_bus.pubsub.names(SubscriptionKind(kind.encode()))
    return [b64encode(name).decode() for name in names] if sum(map(len, names)) <= NAMES_BYTES_MAX else None


@worker_query("subscriber counts")
def subscriber_counts(server: ServerContext, argument: dict[str, Any]) -> list[int]:
    """Return the number of this process's subscribers for each channel."""
    pubsub, kind = server.message_bus.pubsub, SubscriptionKind(argument["kind"].encode())
    return [pubsub.count(kind, b64decode(name)) for name in argument["names"]]
