"""How a message of PUBLISH gets to all clients of a server, whichever of its processes they are at, and to its cluster.

The other processes of this server are asked to pass it on too, and how many clients that was; a node's other nodes are
told (`forward`), which nobody waits for, as in a Redis Cluster.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from resp_server.errors import PlainError
from resp_server.protocol.replies import Frames, Pending, Reply, encode
from resp_server.protocol.subscriptions import Way
from resp_server.pubsub import OWN_CHANNELS, Mail, PubSub, Wants
from state_backend.key_groups import KeyGroups
from state_backend.slots import slot_of

if TYPE_CHECKING:
    from resp_server.instance import Call, Instance

# What is on its way to the other processes of a server at a time, and so how long a message may be there: their lines
# hold 64 MiB, base64 takes a third more, and each of 40 processes may send as much to one that stands still.
PASSED_ON_BYTES_MAX = 1 << 20
WAITING_BYTES_MAX = 16 << 20
# As `instance.GATHER_S_MAX`.
PASS_ON_S_MAX = 2.0

POST = "post a message"


class Publishing:
    """Publishing at one process."""

    def __init__(self, instance: Instance, hub: PubSub | None = None) -> None:
        self._instance = instance
        self.hub = PubSub() if hub is None else hub
        # Tells the other nodes of a cluster; filled in where there are some.
        self.forward: Callable[[Way, bytes, bytes], None] = lambda way, channel, text: None
        self._waiting: deque[tuple[int, dict[str, str], Callable[[list[Any]], None]]] = deque()
        self._waiting_bytes = 0
        self._passed_on_bytes = 0

    def publish(self, call: Call, way: Way, channel: bytes, text: bytes, *, is_forwarded: bool = True) -> Reply:
        """Send a message to all who are subscribed, and answer to how many of this server's clients.

        What the caller itself gets follows the answer, and within a transaction all of its answers.
        """
        if channel.startswith(OWN_CHANNELS):
            raise PlainError(f"channels that begin with {OWN_CHANNELS.decode()} are the server's own")
        self._check_size(len(channel) + len(text))
        mail = self._mail(way, channel, text)
        own = mail.take(call.session)
        mail.send(self._instance.push)
        if is_forwarded:
            self.forward(way, channel, text)
        return self._with_others(way, channel, text, lambda others: self._answer(call, mail.count + others, own))

    def subscribed(self, call: Call, frames: bytes) -> Reply:
        """Answer a SUBSCRIBE or its like. That is sent as messages are: also to clients that want no replies."""
        if call.session.is_silent:
            self._instance.push(call.session.id, frames)
        return Frames(frames)

    def post(self, way: Way, channel: bytes, text: bytes, wants: Wants | None = None) -> int:
        """Send a message to those who are subscribed at this process, and may have it; return how many got it."""
        mail = self._mail(way, channel, text, wants)
        mail.send(self._instance.push)
        return mail.count

    def leave_slots(self, slots: KeyGroups) -> None:
        """End subscriptions to shard channels of slots that this node does not answer any more, and say so."""
        hub = self.hub
        for channel in [each for each in hub.names(Way.SHARD) if slot_of(each) not in slots]:
            for session in hub.sessions(Way.SHARD, channel):
                self._instance.push(session.id, hub.unsubscribe(session, Way.SHARD, [channel]))

    def _mail(self, way: Way, channel: bytes, text: bytes, wants: Wants | None = None) -> Mail:
        mail = Mail()
        if way is Way.SHARD:
            self.hub.post_in_shard(mail, channel, text)
        else:
            self.hub.post(mail, channel, text, wants)
        return mail

    def _answer(self, call: Call, count: int, own: bytes) -> Reply:
        if not own:
            return count
        if call.session.transaction is None and not call.session.is_silent:
            return Frames(encode(count, call.session.protocol) + own)
        self._instance.push(call.session.id, own)
        return count

    # -- the other processes ------------------------------------------------------------------------------------------

    def _check_size(self, size: int) -> None:
        if self._instance.ask_others is None:
            return
        if size > PASSED_ON_BYTES_MAX:
            raise PlainError(f"a message may have {PASSED_ON_BYTES_MAX} bytes where several workers serve a port")
        if self._waiting_bytes + size > WAITING_BYTES_MAX:
            raise PlainError("too many messages wait to be passed on to the other workers")

    def _with_others(self, way: Way, channel: bytes, text: bytes, answer: Callable[[int], Reply]) -> Reply:
        if self._instance.ask_others is None:
            return answer(0)
        pending = Pending(PASS_ON_S_MAX, lambda: answer(0))
        size = len(channel) + len(text)
        argument = {"way": way.value.decode(), "channel": _text_of(channel), "text": _text_of(text)}

        def answered(counts: list[Any]) -> None:
            self._passed_on_bytes -= size
            pending.resolve(lambda: answer(sum(counts)))
            self._pass_on()

        self._waiting.append((size, argument, answered))
        self._waiting_bytes += size
        self._pass_on()
        return pending

    def _pass_on(self) -> None:
        while self._waiting and self._passed_on_bytes + self._waiting[0][0] <= PASSED_ON_BYTES_MAX:
            size, argument, answered = self._waiting.popleft()
            self._waiting_bytes -= size
            self._passed_on_bytes += size
            assert self._instance.ask_others is not None
            self._instance.ask_others(POST, argument, answered)


def post_of(instance: Instance, argument: dict[str, str]) -> int:
    """Send what another process of this server passes on."""
    channel, text = b64decode(argument["channel"]), b64decode(argument["text"])
    return instance.publishing.post(Way(argument["way"].encode()), channel, text)


def _text_of(data: bytes) -> str:
    return b64encode(data).decode()
