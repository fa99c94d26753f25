"""Keyspace notifications, and a channel for each job's epochs: what this server says to its subscribers by itself.

    __keyspace@0__:<key>      <event>      for each event of a key, first this one ...
    __keyevent@0__:<event>    <key>        ... then that one, as the classes say that are asked for
    __sparkis__:epoch:<job>   {"job": "<job>", "term": 1, "epoch": 7}

Appliers keep what happened to each key while somebody wants it (`key_events` of a store). It is read from the view
that clients are answered from, so that nobody is told of an epoch before it can be read; in portions, and with pauses
for those who do not take it as fast. Who takes less than the pauses allow has it waiting in the output, up to the limit
at which clients are cut; and who is so late that the store has let go of what comes next is cut as well.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from time import perf_counter_ns
from typing import NamedTuple, Protocol

from resp_server.acl.visibility import can_see_job
from resp_server.cluster.node_view import NodeView
from resp_server.config import ServerConfig
from resp_server.push.clients import Clients
from resp_server.push.message_bus import MessageBus
from resp_server.push.pubsub import OWN_CHANNELS, MessageBatch
from resp_server.session.session import Session
from resp_server.session.subscriptions import Way
from state_backend.model.errors import StoreError
from state_backend.model.slots import slot_of
from state_backend.store.key_events import Portion, What
from state_backend.store.keyspace import KeyspaceView
from state_backend.store.store import Snapshot

logger = logging.getLogger("sparkis.server")

KEYSPACE, KEYEVENT = b"__keyspace@0__:", b"__keyevent@0__:"
EPOCH = OWN_CHANNELS + b"epoch:"

# What expires is removed once a second or so, and nobody tells of it: how often it is looked for (guess).
LOOK_S = 0.1
# How long messages are made before others have their turn.
SLICE_NS = 2_000_000
# How long is waited for clients that have more waiting than that at which their requests are not read any more.
PATIENCE_S = 1.0
PATIENCE_STEP_S = 0.01

# The classes of events, by their letters; A stands for those that Redis counts as all.
ALL_CLASSES = "g$lshzxetd"
CLASSES = {letter: 1 << number for number, letter in enumerate(ALL_CLASSES + "KEmn")}
TO_KEYSPACE, TO_KEYEVENT = CLASSES["K"], CLASSES["E"]
ALL = sum(CLASSES[letter] for letter in ALL_CLASSES)


class Event(NamedTuple):
    """An event in Redis' words, and its class."""

    name: bytes
    of: int


EVENTS: Mapping[int, Event] = {
    What.NEW: Event(b"new", CLASSES["n"]),
    What.SET: Event(b"set", CLASSES["$"]),
    What.DELETED: Event(b"del", CLASSES["g"]),
    What.EXPIRED: Event(b"expired", CLASSES["x"]),
    What.EXPIRY_SET: Event(b"expire", CLASSES["g"]),
    What.EXPIRY_REMOVED: Event(b"persist", CLASSES["g"]),
    What.FIELDS_SET: Event(b"hset", CLASSES["h"]),
    What.FIELDS_DELETED: Event(b"hdel", CLASSES["h"]),
    What.FIELDS_EXPIRED: Event(b"hexpired", CLASSES["h"]),
    What.FIELD_EXPIRY_SET: Event(b"hexpire", CLASSES["h"]),
    What.APPENDED: Event(b"rpush", CLASSES["l"]),
    What.TRIMMED: Event(b"ltrim", CLASSES["l"]),
    What.MEMBERS_ADDED: Event(b"sadd", CLASSES["s"]),
    What.MEMBERS_REMOVED: Event(b"srem", CLASSES["s"]),
    What.SCORES_SET: Event(b"zadd", CLASSES["z"]),
    What.SCORES_REMOVED: Event(b"zrem", CLASSES["z"]),
}


class ClassesError(ValueError):
    """Letters that are no classes of events; the text is Redis'."""


def classes_of(letters: str) -> int:
    """Return the classes that letters stand for; ClassesError."""
    found = 0
    for letter in letters:
        if letter != "A" and letter not in CLASSES:
            raise ClassesError("Invalid event class character. Use 'Ag$lshzxeKEtmdn'.")
        found |= ALL if letter == "A" else CLASSES[letter]
    return found


def letters_of(classes: int) -> str:
    """Return the letters of classes, so that they can be read again."""
    return "".join(letter for letter, each in CLASSES.items() if classes & each)


def shown_letters(letters: str) -> str:
    """Return the letters that Redis shows for these: `n` is not among them where `A` is."""
    classes = classes_of(letters)
    alone = "A" if classes & ALL == ALL else "".join(each for each in ALL_CLASSES + "n" if classes & CLASSES[each])
    return alone + "".join(each for each in "KEm" if classes & CLASSES[each])


def says_anything(classes: int) -> bool:
    """Tell whether these classes make any message at all."""
    return bool(classes & (TO_KEYSPACE | TO_KEYEVENT) and classes & ~(TO_KEYSPACE | TO_KEYEVENT))


def may_be_of_keys(way: Way, name: bytes) -> bool:
    """Tell whether a channel is one of notifications, or a pattern may match one."""
    if way is Way.PATTERN:
        literal = re.split(rb"[*?\[\\]", name, maxsplit=1)[0]
        return any(each.startswith(literal) or literal.startswith(each) for each in (KEYSPACE, KEYEVENT))
    return name.startswith((KEYSPACE, KEYEVENT))


class _At(NamedTuple):
    """How far what a job's store keeps was told: up to before `serial`, of what was begun under an id."""

    id: bytes
    serial: int


class NotificationHost(Protocol):
    """The process whose clients are notified: of changes that its view shows."""

    config: ServerConfig
    cluster: NodeView | None
    view: KeyspaceView
    clients: Clients
    message_bus: MessageBus
    sessions: dict[int, Session]

    def look(self) -> None:
        """Move the view to the newest epochs of all jobs."""

    def report(self, error: Exception) -> object:
        """Log an unexpected exception."""


class Notifications:
    """What one process tells its subscribers. Runs on the event loop's thread."""

    def __init__(self, host: NotificationHost) -> None:
        self._host = host
        self._hub = host.message_bus.hub
        self._hub.on_change = self._subscriptions_changed
        self._hub.on_leave = self._leave
        self._classes = classes_of(host.config.notify_events)
        self._asked: dict[Session, int] = {}
        self._at: dict[str, _At | None] = {}
        self._epochs: dict[str, tuple[int, int]] = {}
        self._task: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        # The channels and patterns with subscribers that notifications may match.
        self._listened_to: dict[tuple[Way, bytes], None] = {}
        self._not_waited_for: set[Session] = set()
        self._wanted = self._classes  # by anybody
        self._is_wanted = self.is_wanted
        # Told whether appliers have to keep what happens to keys.
        self.on_demand_change: Callable[[bool], None] = lambda is_wanted: None

    # -- what is wanted -----------------------------------------------------------------------------------------------

    @property
    def is_wanted(self) -> bool:
        """Tell whether somebody wants notifications."""
        return any(map(says_anything, (self._classes, *self._asked.values())))

    def configure(self) -> None:
        """Take in what the settings say now."""
        self._classes = classes_of(self._host.config.notify_events)
        self._settle()

    def ask(self, session: Session, classes: int) -> None:
        """Have one client told of these classes, whatever the settings say."""
        self._asked[session] = classes
        self._settle()

    def _leave(self, session: Session) -> None:
        """Forget what a client asked for: it has gone, or sent RESET."""
        self._not_waited_for.discard(session)
        if self._asked.pop(session, None) is not None:
            self._settle()

    def _settle(self) -> None:
        self._wanted = self._classes
        for classes in self._asked.values():
            self._wanted |= classes
        is_wanted = self.is_wanted
        if is_wanted != self._is_wanted:
            self._is_wanted = is_wanted
            self.on_demand_change(is_wanted)

    # -- looking ------------------------------------------------------------------------------------------------------

    def _subscriptions_changed(self, way: Way, name: bytes) -> None:
        """Take in that a channel or pattern got its first subscriber, or lost its last one."""
        if way is not Way.SHARD and may_be_of_keys(way, name):
            if name in self._hub.names(way):
                self._listened_to[way, name] = None
            else:
                self._listened_to.pop((way, name), None)
        self.poll_soon()

    def poll_soon(self) -> None:
        """Look for what is new as soon as may be: subscriptions, or an epoch, may have changed."""
        if self._task is None and not self._hub.is_empty:
            self._begin()
            self._task = asyncio.get_running_loop().create_task(self._keep_looking())
        self._woken.set()

    def close(self) -> None:
        """Tell nothing any more."""
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        """Leave out what was before anybody was there to be told."""
        self._host.look()
        for name, snapshot in self._snapshots():
            kept = snapshot.events_kept()
            self._at[name] = None if kept is None else _At(kept.id, kept.next)
            self._epochs[name] = (snapshot.applied.term, snapshot.applied.epoch)

    async def _keep_looking(self) -> None:
        try:
            while not self._hub.is_empty:
                self._woken.clear()
                try:
                    await self._tell()
                except StoreError as error:  # who reads is told as well; the next look may find it mended
                    logger.warning("nobody is notified of a job for now: %s", error)
                except Exception as error:
                    self._host.report(error)
                    self._cut_listeners()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), LOOK_S)
        finally:
            self._task = None
            self._at.clear()
            self._epochs.clear()

    async def _tell(self) -> None:
        """Tell everything that is new."""
        self._host.look()
        self._tell_epochs()
        for name in [name for name, _ in self._snapshots()]:
            await self._tell_events(name)

    def _snapshots(self) -> Iterator[tuple[str, Snapshot]]:
        return ((job.name, snapshot) for job, snapshot in self._host.view.snapshots())

    # -- epochs -------------------------------------------------------------------------------------------------------

    def _tell_epochs(self) -> None:
        for name, snapshot in self._snapshots():
            applied = snapshot.applied
            reached = (applied.term, applied.epoch)
            if self._epochs.get(name) != reached and applied.epoch >= 0:
                self._epochs[name] = reached
                self.announce_epoch(name, reached)

    def announce_epoch(self, job: str, reached: tuple[int, int]) -> None:
        """Say that an epoch of a job, by its term and number, can be read from now on."""
        told = {"job": job, "term": reached[0], "epoch": reached[1]}
        self._host.message_bus.post(
            Way.CHANNEL, EPOCH + job.encode(), json.dumps(told).encode(), lambda session: can_see_job(session.user, job)
        )

    # -- keys ---------------------------------------------------------------------------------------------------------

    async def _tell_events(self, name: str) -> None:
        """Tell what happened to the keys of a job since the last time, portion by portion."""
        while (portion := self._next_portion(name)) is not None:
            await self._tell_portion(portion)

    def _next_portion(self, name: str) -> Portion | None:
        try:
            snapshot = self._host.view.of_job(name)
        except KeyError:  # it has gone while portions were told
            self._at.pop(name, None)
            return None
        kept = snapshot.events_kept()
        if kept is None:
            self._at[name] = None
            return None
        at = self._at.get(name)
        serial = at.serial if at is not None and at.id == kept.id else kept.first
        if not self._listened_to:
            serial = kept.next
        elif serial < kept.first:
            self._cut_listeners()
            serial = kept.next
        self._at[name] = _At(kept.id, min(serial + 1, kept.next))
        return snapshot.events(serial) if serial < kept.next else None

    def _cut_listeners(self) -> None:
        """Cut those who would miss something: they notice, and can read anew."""
        for way, name in list(self._listened_to):
            for session in self._hub.sessions(way, name):
                if session.id in self._host.sessions:  # by another name it may have been cut already
                    self._host.clients.cut(session.id, "what it would be notified of next is lost")

    async def _tell_portion(self, portion: Portion) -> None:
        mail = MessageBatch()
        ends_ns = perf_counter_ns() + SLICE_NS
        for key, numbers in portion.events:
            for _ in self._posting(mail, key, numbers):
                if perf_counter_ns() >= ends_ns:
                    await self._send(mail)
                    ends_ns = perf_counter_ns() + SLICE_NS
        await self._send(mail)

    def _posting(self, mail: MessageBatch, key: bytes, numbers: bytes) -> Iterator[None]:
        cluster = self._host.cluster
        if cluster is not None and slot_of(key) not in cluster.slots:
            return
        for number in numbers:
            event = EVENTS[number]
            if event.of & self._wanted:
                of_key, of_event = (partial(self._wants, key, event.of, where) for where in (TO_KEYSPACE, TO_KEYEVENT))
                yield from self._hub.posting(mail, KEYSPACE + key, event.name, of_key)
                yield from self._hub.posting(mail, KEYEVENT + event.name, key, of_event)

    def _wants(self, key: bytes, of: int, where: int, session: Session) -> bool:
        """Tell whether a client wants, and may have, messages of a class to one of the two channels."""
        classes = self._asked.get(session, self._classes)
        user = session.user
        return bool(classes & of and classes & where) and (user.is_unrestricted or user.can_read(key))

    async def _send(self, mail: MessageBatch) -> None:
        """Send messages, and wait until there is room for more at those who take them."""
        told = mail.send(self._host.clients.push)
        await asyncio.sleep(0)
        waits_s = 0.0
        while slow := self._slow(told):
            if waits_s >= PATIENCE_S:
                self._not_waited_for |= slow
                return
            waits_s += PATIENCE_STEP_S
            await asyncio.sleep(PATIENCE_STEP_S)

    def _slow(self, told: list[Session]) -> set[Session]:
        pause_bytes = self._host.config.output_pause_bytes
        full = {each for each in told if self._host.clients.output_bytes(each.id) > pause_bytes}
        self._not_waited_for -= set(told) - full
        return full - self._not_waited_for
