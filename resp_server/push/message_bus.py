"""PUBLISH: sends a message to the subscribers at all processes of a server, and at all nodes of its cluster.

The other processes of this server deliver the message, too, and report the number of receivers. The message is also
forwarded to the other nodes of a cluster, without waiting for them, as in a Redis Cluster.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable
from typing import Any

from resp_server.limits import WORKER_MESSAGES_BYTES_MAX
from resp_server.protocol.errors import GenericError
from resp_server.protocol.replies import Frames, Pending, Reply, encode
from resp_server.push.clients import Clients, OtherWorkers
from resp_server.push.cluster_bus import ClusterBus
from resp_server.push.deliveries import Deliveries
from resp_server.push.pubsub import OWN_CHANNELS, Accepts, MessageBatch, PubSub
from resp_server.session.session import Session
from resp_server.session.subscriptions import NAME_BYTES_MAX, SHARD, SubscriptionKind, check_name
from state_backend.model.slot_set import SlotSet
from state_backend.model.slots import slot_of

# The bytes that are relayed to other processes at a time, and so the longest message that is relayed. A process's queue
# takes 64 MiB, base64 adds a third, and each of 40 processes may send this much to one that is paused.
RELAYED_BYTES_MAX = 1 << 20
# The same as `context.GATHER_S_MAX`.
RELAY_S_MAX = 2.0
# Longer than it takes to deliver a message to all subscribers after the messages before it.
DELIVERED_S_MAX = 60.0

POST = "post a message"


class MessageBus:
    """Publishes messages at one process.

    Args:
        workers: Returns the other workers of the port; None: there are none.
        cluster_bus: The connections to the other nodes of a cluster.
        pubsub: The subscriptions; None: there are none yet.
    """

    def __init__(
        self,
        clients: Clients,
        workers: Callable[[], OtherWorkers | None],
        cluster_bus: ClusterBus,
        pubsub: PubSub | None = None,
    ) -> None:
        self._clients = clients
        self._workers = workers
        self.cluster_bus = cluster_bus
        self._deliveries = Deliveries(clients.defer)
        self.pubsub = PubSub() if pubsub is None else pubsub
        self._waiting: deque[tuple[int, dict[str, str], Callable[[list[Any]], None]]] = deque()
        self._waiting_bytes = 0
        self._relayed_bytes = 0

    def publish(
        self, publisher: Session, kind: SubscriptionKind, channel: bytes, text: bytes, *, is_forwarded: bool = True
    ) -> Reply:
        """Send a message to all subscribers; reply with how many of this server's clients got it.

        The publisher's own copy follows the reply; within a transaction it follows all of EXEC's replies.
        """
        if channel.startswith(OWN_CHANNELS):
            raise GenericError(f"channels that begin with {OWN_CHANNELS.decode()} are the server's own")
        if len(channel) > NAME_BYTES_MAX:
            check_name(channel)
        pubsub = self.pubsub
        has_receivers = channel in pubsub.named[kind] or (kind is not SHARD and pubsub.patterns)
        if not has_receivers and not self._deliveries.waiting and self._workers() is None:
            if is_forwarded:
                self.cluster_bus.forward(kind, channel, text)
            return 0
        self._check_size(len(channel) + len(text))
        delivered = _Delivered()

        # own_frames: the publisher's copy.
        def on_delivered(count: int, own_frames: bytes) -> None:
            if is_forwarded:
                self.cluster_bus.forward(kind, channel, text)
            delivered.put(
                self._relay_message(
                    kind, channel, text, lambda others: self._answer(publisher, count + others, own_frames)
                )
            )

        self._deliver(kind, channel, text, on_delivered, except_for=publisher)
        return delivered.reply

    def subscription_reply(self, session: Session, frames: bytes) -> Reply:
        """Return the reply to SUBSCRIBE and the like. As messages are, it is sent even if CLIENT REPLY is OFF."""
        if session.replies_suppressed:
            self._clients.push(session.id, frames)
        return Frames(frames)

    def post(
        self,
        kind: SubscriptionKind,
        channel: bytes,
        text: bytes,
        accepts: Accepts | None = None,
        done: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Send a message to those of this process's subscribers that `accepts` accepts; `done` gets their number."""
        self._deliver(kind, channel, text, lambda count, _: done(count), accepts)

    def _deliver(
        self,
        kind: SubscriptionKind,
        channel: bytes,
        text: bytes,
        done: Callable[[int, bytes], None],
        accepts: Accepts | None = None,
        except_for: Session | None = None,
    ) -> None:
        """Send a message; `done` gets the number of receivers, and the frames for `except_for`, which are not sent."""
        batch, own_frames = MessageBatch(), []

        def flush() -> None:
            if except_for is not None:
                own_frames.append(batch.take(except_for))
            batch.send(self._clients.push)

        if kind is SHARD:
            steps = self.pubsub.post_to_shard_in_steps(batch, channel, text)
        else:
            steps = self.pubsub.post_in_steps(batch, channel, text, accepts)
        self._deliveries.add(steps, flush, lambda: done(batch.count, b"".join(own_frames)))

    def leave(self, session: Session) -> None:
        """End all subscriptions of a client without replies: in steps, as there may be many."""
        if session.subscriptions is None:
            self.pubsub.on_leave(session)
            return
        self._deliveries.add(self.pubsub.leave(session), lambda: None, lambda: None)

    def leave_slots(self, slots: SlotSet) -> None:
        """End subscriptions to shard channels of slots that this node lost, with SUNSUBSCRIBE replies."""
        pubsub = self.pubsub
        for channel in [each for each in pubsub.names(SHARD) if slot_of(each) not in slots]:
            for session in pubsub.sessions(SHARD, channel):
                self._clients.push(session.id, pubsub.unsubscribe(session, SHARD, [channel]))

    def _answer(self, publisher: Session, count: int, own_frames: bytes) -> Reply:
        if not own_frames:
            return count
        if publisher.transaction is None and not publisher.replies_suppressed:
            return Frames(encode(count, publisher.protocol) + own_frames)
        self._clients.push(publisher.id, own_frames)
        return count

    # -- the other processes ------------------------------------------------------------------------------------------

    def _check_size(self, size: int) -> None:
        if self._workers() is None:
            return
        if size > RELAYED_BYTES_MAX:
            raise GenericError(f"a message may have {RELAYED_BYTES_MAX} bytes where several workers serve a port")
        if self._waiting_bytes + size > WORKER_MESSAGES_BYTES_MAX:
            raise GenericError("too many messages wait to be relayed to the other workers")

    def _relay_message(
        self, kind: SubscriptionKind, channel: bytes, text: bytes, answer: Callable[[int], Reply]
    ) -> Reply:
        """Relay a message to the other processes; `answer` makes the reply from the number of receivers there."""
        if self._workers() is None:
            return answer(0)
        pending = Pending(RELAY_S_MAX, lambda: answer(0))
        size = len(channel) + len(text)
        argument = {"kind": kind.value.decode(), "channel": _text_of(channel), "text": _text_of(text)}

        def on_counts(counts: list[Any]) -> None:
            self._relayed_bytes -= size
            pending.resolve(lambda: answer(sum(counts)))
            self._relay()

        self._waiting.append((size, argument, on_counts))
        self._waiting_bytes += size
        self._relay()
        return pending

    def _relay(self) -> None:
        while self._waiting and self._relayed_bytes + self._waiting[0][0] <= RELAYED_BYTES_MAX:
            size, argument, on_counts = self._waiting.popleft()
            self._waiting_bytes -= size
            self._relayed_bytes += size
            workers = self._workers()
            assert workers is not None
            workers.query(POST, argument, on_counts)


def post_of(message_bus: MessageBus, argument: dict[str, str]) -> Reply:
    """Send a message of another process to this one's subscribers; return their number."""
    channel, text = b64decode(argument["channel"]), b64decode(argument["text"])
    delivered = _Delivered()
    message_bus.post(SubscriptionKind(argument["kind"].encode()), channel, text, done=delivered.put)
    return delivered.reply


class _Delivered:
    """The reply to a PUBLISH: known at once, or when the message was delivered."""

    def __init__(self) -> None:
        self._reply: Reply = None
        self._pending: Pending | None = None

    def put(self, reply: Reply) -> None:
        """Set the reply, which may be pending as well."""
        if self._pending is None:
            self._reply = reply
        elif isinstance(reply, Pending):
            then, pending = reply, self._pending
            then.when_resolved(lambda: pending.resolve(then.make))
        else:
            self._pending.resolve(lambda: reply)

    @property
    def reply(self) -> Reply:
        """The reply, or a pending one."""
        if self._reply is None:
            self._pending = Pending(DELIVERED_S_MAX, _not_delivered)
            return self._pending
        return self._reply


def _not_delivered() -> Reply:
    raise GenericError("the message is still being sent, after earlier messages")


def _text_of(data: bytes) -> str:
    return b64encode(data).decode()
