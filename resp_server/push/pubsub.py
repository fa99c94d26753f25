"""The subscriptions at one process, and the receivers of each message. No sockets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from resp_server.protocol.glob import Matches, check_pattern, matcher
from resp_server.session.session import Session
from resp_server.session.subscriptions import (
    CHANNEL,
    PATTERN,
    SHARD,
    SubscriptionKind,
    Subscriptions,
    message,
    subscription_reply,
)

# The server's own channels; clients cannot publish on them.
OWN_CHANNELS = b"__sparkis__:"

# What the replies to SUBSCRIBE and UNSUBSCRIBE, and the like, begin with.
VERBS = {kind: (kind.value + b"subscribe", kind.value + b"unsubscribe") for kind in SubscriptionKind}

Accepts = Callable[[Session], bool]


class _Pattern(dict[Session, None]):
    """The subscribers of a pattern, which is compiled when the first message comes.

    It is one object, because all objects are visited in one turn of the loop when Python collects garbage.
    """

    __slots__ = ("_glob", "_matches")

    def __init__(self, glob: bytes) -> None:
        check_pattern(glob)
        self._glob = glob
        self._matches: Matches | None = None

    def matches(self, channel: bytes) -> object:
        """Return whether a channel matches."""
        if self._matches is None:
            self._matches = matcher(self._glob)
        return self._matches(channel)


class ReceiverCount:
    """Counts the subscriptions that match a channel: its names and patterns, and their clients."""

    def __init__(self) -> None:
        self.names = 0
        self.clients = 0

    def add(self, clients: int) -> None:
        """Count a name or pattern with so many subscribers."""
        self.names += clients > 0
        self.clients += clients


class MessageBatch:
    """Messages that are sent together, each client's in one write."""

    def __init__(self) -> None:
        self._frames: dict[Session, list[bytes]] = {}
        self.count = 0
        self.bytes = 0

    def add(self, session: Session, frame: bytes) -> None:
        """Add a message for a client."""
        self._frames.setdefault(session, []).append(frame)
        self.count += 1
        self.bytes += len(frame)

    def take(self, session: Session) -> bytes:
        """Remove and return one client's messages."""
        return b"".join(self._frames.pop(session, ()))

    def send(self, push: Callable[[int, bytes], None]) -> list[Session]:
        """Send all messages, and empty the batch; return the receivers."""
        sent, self._frames = self._frames, {}
        for session, frames in sent.items():
            push(session.id, b"".join(frames))
        return list(sent)


class PubSub:
    """All subscriptions at one process.

    Attributes:
        named: The subscribers of each channel, and of each shard channel.
        patterns: Those of each pattern.
    """

    def __init__(self) -> None:
        self.named: dict[SubscriptionKind, dict[bytes, dict[Session, None]]] = {
            CHANNEL: {},
            SHARD: {},
        }
        self.patterns: dict[bytes, _Pattern] = {}
        # Called with a channel or pattern when it gets its first subscriber, and when it loses its last one.
        self.on_change: Callable[[SubscriptionKind, bytes], None] = lambda kind, name: None
        # Called when a client disconnects, or sends RESET.
        self.on_leave: Callable[[Session], None] = lambda session: None

    # -- subscribers --------------------------------------------------------------------------------------------------

    def subscribe(self, session: Session, kind: SubscriptionKind, names: Sequence[bytes]) -> bytes:
        """Subscribe a client; return the encoded replies. GenericError for too many; then nothing changes."""
        subscriptions = Subscriptions() if session.subscriptions is None else session.subscriptions
        new_patterns: dict[bytes, _Pattern] | None = None  # it is checked before the first change
        held, verb, protocol = subscriptions.by_kind[kind], VERBS[kind][0], session.protocol
        out, count = [], subscriptions.count(kind)
        for name in names:
            if name not in held:
                if new_patterns is None:
                    new_patterns = self._checked(subscriptions, kind, names)
                self._add(session, kind, name, new_patterns)
                subscriptions.add(kind, name)
                count += 1
            out.append(subscription_reply(verb, name, count, protocol))
        if new_patterns is not None:
            session.set_subscriptions(subscriptions)
        return b"".join(out)

    def _checked(
        self, subscriptions: Subscriptions, kind: SubscriptionKind, names: Sequence[bytes]
    ) -> dict[bytes, _Pattern]:
        """Return the names that are new patterns here; GenericError for too many names."""
        subscriptions.check_limits(kind, names)
        return {name: _Pattern(name) for name in names if name not in self.patterns} if kind is PATTERN else {}

    def _add(self, session: Session, kind: SubscriptionKind, name: bytes, new_patterns: dict[bytes, _Pattern]) -> None:
        is_new = name not in self.names(kind)
        if kind is PATTERN:
            if is_new:
                self.patterns[name] = new_patterns[name]
            self.patterns[name][session] = None
        else:
            self.named[kind].setdefault(name, {})[session] = None
        if is_new:
            self.on_change(kind, name)

    def unsubscribe(self, session: Session, kind: SubscriptionKind, names: Iterable[bytes] = ()) -> bytes:
        """End subscriptions of a client, all of this kind if none is named; return the encoded replies."""
        verb = VERBS[kind][1]
        if session.subscriptions is None:
            ended: list[bytes | None] = list(names) or [None]
            return b"".join([subscription_reply(verb, name, 0, session.protocol) for name in ended])
        subscriptions = session.subscriptions
        out = []
        for name in list(names) or list(subscriptions.by_kind[kind]):
            if subscriptions.remove(kind, name):
                self._leave(session, kind, name)
            out.append(subscription_reply(verb, name, subscriptions.count(kind), session.protocol))
        session.set_subscriptions(subscriptions)
        return b"".join(out) or subscription_reply(verb, None, subscriptions.count(kind), session.protocol)

    def leave(self, session: Session) -> Iterator[None]:
        """End all subscriptions of a client without replies: it disconnected, or sent RESET.

        The client gets no more messages from now on. The returned steps remove its names.
        """
        self.on_leave(session)
        ended = session.subscriptions or Subscriptions()
        session.set_subscriptions(Subscriptions())
        return self._leaving(session, ended)

    def _leaving(self, session: Session, ended: Subscriptions) -> Iterator[None]:
        for kind in SubscriptionKind:
            for name in ended.by_kind[kind]:
                if not session.is_subscribed(kind, name):  # not subscribed again after RESET
                    self._leave(session, kind, name)
                yield

    def _leave(self, session: Session, kind: SubscriptionKind, name: bytes) -> None:
        """Remove a client from a channel or pattern, if it is subscribed."""
        sessions = self._subscribed(kind, name)
        if session not in sessions:
            return  # it subscribed and unsubscribed again before this step
        del sessions[session]
        if sessions:
            return
        if kind is PATTERN:
            del self.patterns[name]
        else:
            del self.named[kind][name]
        self.on_change(kind, name)

    def _subscribed(self, kind: SubscriptionKind, name: bytes) -> dict[Session, None]:
        if kind is PATTERN:
            return self.patterns.get(name, {})
        return self.named[kind].get(name, {})

    def names(self, kind: SubscriptionKind) -> Collection[bytes]:
        """Return the channels or patterns with subscribers."""
        return self.patterns if kind is PATTERN else self.named[kind]

    def count(self, kind: SubscriptionKind, name: bytes) -> int:
        """Return the number of a channel's subscribers."""
        return len(self._subscribed(kind, name))

    def sessions(self, kind: SubscriptionKind, name: bytes) -> list[Session]:
        """Return the subscribers of a channel, or of a pattern as it was written."""
        return [session for session in self._subscribed(kind, name) if session.is_subscribed(kind, name)]

    def count_in_steps(self, found: ReceiverCount, kind: SubscriptionKind, channel: bytes) -> Iterator[None]:
        """Add the receivers of a message on a channel to `found`, one name or pattern at each step."""
        named = self.named[kind].get(channel, {})
        found.add(len(named))
        if kind is SHARD:
            return
        for pattern in list(self.patterns.values()):
            yield
            if pattern and pattern.matches(channel):
                found.add(len(pattern))

    @property
    def is_empty(self) -> bool:
        """Return whether there are no subscriptions to channels or patterns."""
        return not self.patterns and not self.named[CHANNEL]

    # -- messages ----------------------------------------------------------------------------------------------------

    def post_in_steps(
        self, batch: MessageBatch, channel: bytes, text: bytes, accepts: Accepts | None = None
    ) -> Iterator[None]:
        """Add a message to a batch for all subscribers of a channel, one client or pattern at each step.

        Subscribers by name come first, then those by pattern. Between steps subscriptions may change.
        """
        frames: dict[tuple[SubscriptionKind, bytes, int], bytes] = {}
        for kind, pattern, session in self._receivers(channel):
            if session is not None and (accepts is None or accepts(session)):
                which = (kind, pattern, session.protocol)
                frame = frames.get(which)
                if frame is None:
                    frame = frames[which] = message(kind, pattern, channel, text, session.protocol)
                batch.add(session, frame)
            yield

    def post_to_shard_in_steps(self, batch: MessageBatch, channel: bytes, text: bytes) -> Iterator[None]:
        """Add a message to a batch for all subscribers of a shard channel, one client at each step."""
        subscribed = self.named[SHARD].get(channel, {})
        for session in list(subscribed):
            if session.is_subscribed(SHARD, channel):
                batch.add(session, message(SHARD, b"", channel, text, session.protocol))
            yield

    def _receivers(self, channel: bytes) -> Iterator[tuple[SubscriptionKind, bytes, Session | None]]:
        """Iterate over the receivers of a message; None for a pattern that does not match."""
        subscribed = self.named[CHANNEL].get(channel, {})
        for session in list(subscribed):
            if session.is_subscribed(CHANNEL, channel):
                yield CHANNEL, b"", session
        for name, pattern in list(self.patterns.items()):
            if not pattern.matches(channel):
                yield PATTERN, name, None
                continue
            for session in list(pattern):
                if session.is_subscribed(PATTERN, name):
                    yield PATTERN, name, session
