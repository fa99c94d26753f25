"""PUBLISH, SPUBLISH and the confirmations of subscriptions at a proxy."""

from __future__ import annotations

from functools import partial

from resp_server.backends.servers.aliased_keys import AliasedKeys
from resp_server.backends.servers.pubsub_relay import PubsubRelay
from resp_server.backends.servers.requests import ServerRequest
from resp_server.backends.servers.state_clusters import StateClusters
from resp_server.pipeline.context import ServerContext
from resp_server.protocol.errors import ClusterDownError, GenericError
from resp_server.protocol.replies import Frames, Pending, Reply
from resp_server.push.message_bus import MessageBus
from resp_server.push.pubsub import OWN_CHANNELS, ReceiverCount
from resp_server.raw_replies.answers import Answer, ReplyFuture, run_into
from resp_server.raw_replies.raw_reply import RawReply, as_bytes
from resp_server.raw_replies.reply_sinks import ReplySink
from resp_server.raw_replies.reply_splitter import pack
from resp_server.session.epochs import NO_EPOCHS, ReplyEpochs
from resp_server.session.session import Session
from resp_server.session.subscriptions import SubscriptionKind, check_name
from state_backend.model.slots import slot_of


class _PendingSink(ReplySink):
    """Takes a pending reply."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        self._pending.resolve(lambda: Frames(as_bytes(reply)))

    def fail(self, index: int, error: Exception) -> None:
        self._pending.resolve(partial(_raise, error))


class ProxyMessageBus(MessageBus):
    """Publishes at the proxy's home server, which also sends the message back for the proxy's own clients."""

    def __init__(self, server: ServerContext, clusters: StateClusters, relay: PubsubRelay) -> None:
        bus = server.message_bus
        super().__init__(server.clients, lambda: server.workers, bus.cluster_bus, bus.pubsub)
        self.clusters = clusters
        self.relay = relay

    def publish(
        self, publisher: Session, kind: SubscriptionKind, channel: bytes, text: bytes, *, is_forwarded: bool = True
    ) -> Reply:
        if channel.startswith(OWN_CHANNELS):
            raise GenericError(f"channels that begin with {OWN_CHANNELS.decode()} are the server's own")
        cluster = self.clusters[0]
        home = self.relay.home
        if home is None:
            raise ClusterDownError
        check_name(channel)
        found = ReceiverCount()  # of the proxy's own clients, because the server counts relay connections
        pending = Pending(2 * cluster.access.timeout_s, _too_late)
        packed = pack((b"SPUBLISH" if kind is SubscriptionKind.SHARD else b"PUBLISH", channel, text))
        address = None if kind is SubscriptionKind.SHARD else home

        async def receivers() -> Answer:
            """Return the number of receivers, or the server's error."""
            sent = ReplyFuture()
            cluster.send(ServerRequest(packed, slot_of(channel), 2, cluster.deadline_s(), sent, 0, address))
            reply = as_bytes((await sent).reply)
            if reply[:1] != b":":
                return Answer(reply)
            return Answer(b":%d\r\n" % (max(int(reply[1:]) - found.names, 0) + found.clients))

        count = self.pubsub.count_in_steps(found, kind, channel)
        self._deliveries.add(count, lambda: None, lambda: run_into(receivers(), _PendingSink(pending), 0))
        return pending

    def subscription_reply(self, session: Session, frames: bytes) -> Reply:
        if self.relay.is_synced:  # nothing has changed for servers
            return super().subscription_reply(session, frames)
        answered = partial(super().subscription_reply, session, frames)
        pending = Pending(self.clusters[0].access.timeout_s, answered)
        self.relay.when_synced(lambda: pending.resolve(answered))
        return pending


def _raise(error: Exception) -> Reply:
    raise error


def _too_late() -> Reply:
    raise GenericError("no server took the message in time")


def connect_pubsub(clusters: StateClusters, server: ServerContext, aliases: AliasedKeys | None = None) -> PubsubRelay:
    """Relay the messages and subscriptions of a proxy's clients over its servers; return the relay."""
    relay = PubsubRelay(clusters, server, aliases)
    server.message_bus = ProxyMessageBus(server, clusters, relay)
    return relay
