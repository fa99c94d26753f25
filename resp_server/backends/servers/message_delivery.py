"""Delivers the messages of servers to a proxy's clients: as they are, or with the clients' names of states' keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from resp_server.backends.routing.rules import Rule
from resp_server.backends.servers.aliased_keys import AliasedKeys
from resp_server.backends.servers.field_names import has_fields
from resp_server.backends.servers.field_notifications import FieldListeners, FieldReads
from resp_server.backends.servers.requests import ServerRequest
from resp_server.backends.servers.state_cluster import StateCluster
from resp_server.pipeline.context import ServerContext
from resp_server.push.keyspace_notifications import KEYEVENT, KEYSPACE, heads_of
from resp_server.push.pubsub import OWN_CHANNELS, MessageBatch
from resp_server.raw_replies.answers import Replies, StepPauses
from resp_server.raw_replies.raw_reply import Steps
from resp_server.raw_replies.reply_sinks import ReplySink
from resp_server.raw_replies.reply_splitter import pack
from resp_server.session.session import Session
from resp_server.session.subscriptions import SubscriptionKind, message
from state_backend.model.slots import slot_of


class MessageDelivery:
    """Delivers messages. Runs on the event loop's thread.

    Args:
        aliases: None without an upstream. With one, clients get only the notifications of states' keys, also with the
            clients' names of the keys; the upstream sends all other messages.

    Attributes:
        sources: The relay's own patterns for keys with other names or in other databases, with their rules.
    """

    def __init__(self, server: ServerContext, aliases: AliasedKeys | None) -> None:
        self.server, self._aliases = server, aliases
        self._pubsub = server.message_bus.pubsub
        self.sources: Mapping[bytes, Sequence[Rule]] = {}
        self.fields = FieldListeners(self._pubsub)
        self._ignored_slow_clients: set[Session] = set()

    def deliver(
        self,
        batch: MessageBatch,
        kind: SubscriptionKind,
        name: bytes,
        channel: bytes,
        text: bytes,
        *,
        is_from_home: bool,
    ) -> Steps[None]:
        """Deliver a message to the subscribers of its channel or pattern, one client in each step.

        Args:
            is_from_home: The server relays messages between clients, too.
        """
        is_of_keys = kind is not SubscriptionKind.SHARD and channel.startswith((KEYSPACE, KEYEVENT))
        if channel.startswith(OWN_CHANNELS) or not (is_of_keys or is_from_home or kind is SubscriptionKind.SHARD):
            return
        key, event = _event_in(channel, text)
        if is_of_keys and self.fields.is_hidden(event):
            return
        if kind is SubscriptionKind.PATTERN and name in self.sources:
            yield from self._deliver_by_aliases(batch, name, key, event)
        if self._aliases is not None and not (is_of_keys and self._aliases.is_state(key)):
            return
        frames: dict[int, bytes] = {}
        for session in self._pubsub.sessions(kind, name):
            if not session.is_subscribed(kind, name):
                continue  # the client has unsubscribed
            if is_of_keys and not (session.user.is_unrestricted or session.user.can_read(key)):
                continue
            if session.protocol not in frames:
                frames[session.protocol] = message(kind, name, channel, text, session.protocol)
            batch.add(session, frames[session.protocol])
            yield

    def _deliver_by_aliases(self, batch: MessageBatch, source: bytes, key: bytes, event: bytes) -> Iterator[None]:
        """Deliver a notification of a state's key with the names that clients know."""
        assert self._aliases is not None
        events = self.server.config.notify_keyspace_events
        rules = [rule for rule in self.sources[source] if not has_fields(rule)]
        for database, name in self._aliases.aliases_of(key, rules):
            heads = heads_of(database)

            def accepts(session: Session, name: bytes = name) -> bool:
                return session.user.is_unrestricted or session.user.can_read(name)

            if "K" in events:
                yield from self._pubsub.post_in_steps(batch, heads.keyspace + name, event, accepts)
            if "E" in events:
                yield from self._pubsub.post_in_steps(batch, heads.keyevent + event, name, accepts)

    async def read_fields(self, cluster: StateCluster, frame: Any, pauses: StepPauses) -> FieldReads | None:
        """Send the reads of a hash's fields whose names clients listen to, for a frame of a server; None: none."""
        match frame:
            case [b"pmessage", bytes(pattern), bytes(channel), bytes(text)] if pattern in self.sources:
                event = self.fields.event_of(*_event_in(channel, text), self.sources[pattern])
            case _:
                event = None
        if event is None:
            return None
        reads = FieldReads(event, Replies())
        slot = slot_of(event.key)
        for request in event.requests():

            def send(sink: ReplySink, index: int, packed: bytes = pack(request)) -> None:
                cluster.send(ServerRequest(packed, slot, 2, cluster.deadline_s(), sink, index))

            reads.replies.ask(send)
            await pauses
        return reads

    def slow(self, recipients: Sequence[Session]) -> set[Session]:
        """Return the clients to wait for: their output exceeds `output_pause_bytes`, and their time is not over yet."""
        pause_bytes = self.server.config.output_pause_bytes
        full = {recipient for recipient in recipients if self.server.clients.output_bytes(recipient.id) > pause_bytes}
        self._ignored_slow_clients -= set(recipients) - full
        return full - self._ignored_slow_clients

    def stop_waiting_for(self, recipients: Sequence[Session]) -> None:
        """Stop waiting for clients that are still slow, until they have caught up."""
        self._ignored_slow_clients |= self.slow(recipients)


def _event_in(channel: bytes, text: bytes) -> tuple[bytes, bytes]:
    """Return the key and the event of a keyspace notification."""
    if channel.startswith(KEYEVENT):
        return text, channel.removeprefix(KEYEVENT)
    return channel.removeprefix(KEYSPACE), text
