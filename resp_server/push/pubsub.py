"""Who is subscribed to what at this process, and how a message gets to them. Values and a way to push; no sockets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from resp_server.protocol.glob import Matches, later_matcher
from resp_server.session.session import Session
from resp_server.session.subscriptions import Subscriptions, Way, answer, message

# Channels that the server itself speaks on; nobody else does.
OWN_CHANNELS = b"__sparkis__:"

SUBSCRIBE, UNSUBSCRIBE = b"subscribe", b"unsubscribe"

Wants = Callable[[Session], bool]


class _Pattern(NamedTuple):
    """A pattern that somebody is subscribed to."""

    matches: Matches
    sessions: dict[Session, None]


class Found:
    """Counts the subscriptions to a channel: names and patterns, and clients that have them."""

    def __init__(self) -> None:
        self.names = 0
        self.clients = 0

    def add(self, clients: int) -> None:
        """Count a name or pattern that some clients are subscribed to."""
        self.names += clients > 0
        self.clients += clients


class MessageBatch:
    """Messages that go out together, so that a client gets those to it in one write."""

    def __init__(self) -> None:
        self._frames: dict[Session, list[bytes]] = {}
        self.count = 0
        self.bytes = 0

    def add(self, session: Session, frame: bytes) -> None:
        """Add a message to a client."""
        self._frames.setdefault(session, []).append(frame)
        self.count += 1
        self.bytes += len(frame)

    def take(self, session: Session) -> bytes:
        """Return what is for one client, and forget it."""
        return b"".join(self._frames.pop(session, ()))

    def send(self, push: Callable[[int, bytes], None]) -> list[Session]:
        """Send everything, and forget it; return to whom."""
        sent, self._frames = self._frames, {}
        for session, frames in sent.items():
            push(session.id, b"".join(frames))
        return list(sent)


class PubSub:
    """All subscriptions at one process."""

    def __init__(self) -> None:
        self._named: dict[Way, dict[bytes, dict[Session, None]]] = {Way.CHANNEL: {}, Way.SHARD: {}}
        self._patterns: dict[bytes, _Pattern] = {}
        # Called with a channel or pattern when the first client comes to it, and when the last one has gone.
        self.on_change: Callable[[Way, bytes], None] = lambda way, name: None
        # Called when a client has gone, or sent RESET.
        self.on_leave: Callable[[Session], None] = lambda session: None

    # -- who --------------------------------------------------------------------------------------------------------

    def subscribe(self, session: Session, way: Way, names: Sequence[bytes]) -> bytes:
        """Subscribe a client; return the answers as they are sent. PlainError, and then nothing has changed."""
        subscriptions = session.subscriptions or Subscriptions()
        subscriptions.check_room(way, names)
        new = [name for name in names if name not in self._patterns] if way is Way.PATTERN else []
        compiled = {name: later_matcher(name) for name in new}
        out = []
        for name in names:
            is_new = name not in self.names(way)
            if way is Way.PATTERN:
                if is_new:
                    self._patterns[name] = _Pattern(compiled[name], {})
                self._patterns[name].sessions[session] = None
            else:
                self._named[way].setdefault(name, {})[session] = None
            if is_new:
                self.on_change(way, name)
            subscriptions.add(way, name)
            out.append(answer(way.value + SUBSCRIBE, name, subscriptions.count(way), session.protocol))
        session.subscribe(subscriptions)
        return b"".join(out)

    def unsubscribe(self, session: Session, way: Way, names: Iterable[bytes] = ()) -> bytes:
        """End subscriptions of a client, all of this way if none is named; return the answers as they are sent."""
        subscriptions = session.subscriptions or Subscriptions()
        verb = way.value + UNSUBSCRIBE
        out = []
        for name in list(names) or list(subscriptions.of(way)):
            if subscriptions.remove(way, name):
                self._leave(session, way, name)
            out.append(answer(verb, name, subscriptions.count(way), session.protocol))
        session.subscribe(subscriptions)
        return b"".join(out) or answer(verb, None, subscriptions.count(way), session.protocol)

    def leave(self, session: Session) -> Iterator[None]:
        """End all subscriptions of a client without a word: it has gone, or sent RESET.

        From now on it gets nothing more. Its names are forgotten in the steps that are returned.
        """
        self.on_leave(session)
        left = session.subscriptions or Subscriptions()
        session.subscribe(Subscriptions())
        return self._leaving(session, left)

    def _leaving(self, session: Session, left: Subscriptions) -> Iterator[None]:
        for way in Way:
            for name in left.of(way):
                if not session.is_subscribed(way, name):  # again, after RESET
                    self._leave(session, way, name)
                yield

    def _leave(self, session: Session, way: Way, name: bytes) -> None:
        """Forget that a client is subscribed to a channel or pattern, if it is."""
        sessions = self._subscribed(way, name)
        if session not in sessions:
            return  # after RESET it came again, and left before its turn came
        del sessions[session]
        if sessions:
            return
        if way is Way.PATTERN:
            del self._patterns[name]
        else:
            del self._named[way][name]
        self.on_change(way, name)

    def _subscribed(self, way: Way, name: bytes) -> dict[Session, None]:
        if way is Way.PATTERN:
            return self._patterns[name].sessions if name in self._patterns else {}
        return self._named[way].get(name, {})

    def names(self, way: Way) -> Collection[bytes]:
        """Return the channels or patterns that somebody is subscribed to."""
        return self._patterns if way is Way.PATTERN else self._named[way]

    def count(self, way: Way, name: bytes) -> int:
        """Return how many clients are subscribed to a channel."""
        return len(self._subscribed(way, name))

    def sessions(self, way: Way, name: bytes) -> list[Session]:
        """Return the clients that are subscribed to a channel, or to a pattern as it was written."""
        return [session for session in self._subscribed(way, name) if session.is_subscribed(way, name)]

    def counting(self, found: Found, way: Way, channel: bytes) -> Iterator[None]:
        """Count who would get a message on a channel, by a name or pattern at each step."""
        named = self._named[way].get(channel, {})
        found.add(len(named))
        if way is Way.SHARD:
            return
        for pattern in list(self._patterns.values()):
            yield
            if pattern.sessions and pattern.matches(channel):
                found.add(len(pattern.sessions))

    @property
    def is_empty(self) -> bool:
        """Tell whether nobody is subscribed to channels or patterns."""
        return not self._patterns and not self._named[Way.CHANNEL]

    # -- what -------------------------------------------------------------------------------------------------------

    def posting(self, mail: MessageBatch, channel: bytes, text: bytes, wants: Wants | None = None) -> Iterator[None]:
        """Add a message on a channel for all who are subscribed to it, a client or a pattern at each step.

        By its name first, then by patterns. Between the steps subscriptions may change.
        """
        frames: dict[tuple[Way, bytes, int], bytes] = {}
        for way, pattern, session in self._receivers(channel):
            if session is not None and (wants is None or wants(session)):
                which = (way, pattern, session.protocol)
                frame = frames.get(which)
                if frame is None:
                    frame = frames[which] = message(way, pattern, channel, text, session.protocol)
                mail.add(session, frame)
            yield

    def posting_in_shard(self, mail: MessageBatch, channel: bytes, text: bytes) -> Iterator[None]:
        """Add a message on a shard channel, likewise."""
        subscribed = self._named[Way.SHARD].get(channel, {})
        for session in list(subscribed):
            if session.is_subscribed(Way.SHARD, channel):
                mail.add(session, message(Way.SHARD, b"", channel, text, session.protocol))
            yield

    def _receivers(self, channel: bytes) -> Iterator[tuple[Way, bytes, Session | None]]:
        """Find who gets a message; None where a pattern was only looked at."""
        subscribed = self._named[Way.CHANNEL].get(channel, {})
        for session in list(subscribed):
            if session.is_subscribed(Way.CHANNEL, channel):
                yield Way.CHANNEL, b"", session
        for name, pattern in list(self._patterns.items()):
            if not pattern.matches(channel):
                yield Way.PATTERN, name, None
                continue
            for session in list(pattern.sessions):
                if session.is_subscribed(Way.PATTERN, name):
                    yield Way.PATTERN, name, session
