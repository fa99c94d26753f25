"""MULTI ... EXEC over keys of several servers, at one epoch of each job; and WATCH.

The proxy queues; EXEC goes to each owner as one block, in one write, that names the epochs to read at and the keys that
must not have changed:

    STATE EXPECT key mark ...   STATE AT job term epoch ... clock   MULTI   its commands ...   EXEC

The epoch of a job is the newest that any server has told of, so that no client sees it go back. Servers that had it go
by hold it for a moment; one that has yet to reach it, or that passed it by, says so, and all are asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from resp_server.commands.sort import check_request
from resp_server.errors import ClusterDownError, PlainError, ReplyError, TryAgainError
from resp_server.execution import NOTHING_RUN, QueuedCall
from resp_server.instance import Call
from resp_server.protocol.following import NOT_TOLD, Reached, Told
from resp_server.protocol.replies import Pending
from resp_server.protocol.requests import Request
from resp_server.protocol.transaction import Mark
from resp_server.router.applications import Applications
from resp_server.router.asks import MISREAD, PING, SENDS_MAX, Ask, Merge, Step, TakesReplies, not_understood
from resp_server.router.frames import items_of, pack
from resp_server.router.lane import LaneKey
from resp_server.router.routes import Way, split, way_of
from resp_server.router.upstream import NOT_YET, Upstreams
from state_backend.slots import slot_of

if TYPE_CHECKING:
    from resp_server.router.dispatcher import ProxyDispatcher

# Between two tries, doubled each time: servers apply an epoch some milliseconds apart.
PAUSE_S = 0.005
PAUSE_S_MAX = 0.1
# Losing a connection, or a server, costs a try; more of them mean that something is wrong.
LOSSES_MAX = 2
# More commands than this go where long answers are waited for (guess: they take a server some milliseconds).
SHORT_COMMANDS_MAX = 512

MULTI, EXEC = pack((b"MULTI",)), pack((b"EXEC",))


class Part(NamedTuple):
    """A command's part for one server: the block, and the command's number in it."""

    block: Block
    number: int


class Planned(NamedTuple):
    """What becomes of one queued command: asked in parts, or answered here; error: what it is answered with."""

    request: Request
    parts: Sequence[Part] = ()
    merge: Merge | None = None
    error: ReplyError | None = None


@dataclass
class Block(TakesReplies):
    """What one server is asked in one write, and its answers so far. Asked again as a whole, or not at all."""

    upstreams: Upstreams
    address: str
    whose: TransactionRun
    packed: list[bytes] = field(default_factory=list)
    watched: dict[bytes, Mark] = field(default_factory=dict)
    replies: list[bytes] = field(default_factory=list)
    wants: int = 0
    deadline_s: float = 0.0
    protocol: int = 2

    def add(self, request: Request) -> int:
        """Add a command; return its number."""
        self.packed.append(pack(request))
        return len(self.packed) - 1

    def send(self, epochs: dict[str, Reached], clock_ms: int, protocol: int) -> bool:
        """Ask the server; False if there is no connection to it yet."""
        is_long = len(self.packed) > SHORT_COMMANDS_MAX
        lane = self.upstreams.lane(LaneKey(self.address, protocol, is_long))
        words = [pack((b"STATE", b"AT", *_named(epochs), b"%d" % clock_ms)), MULTI, *self.packed, EXEC]
        if self.watched:
            pairs = [each for key, mark in self.watched.items() for each in (key, mark.text)]
            words.insert(0, pack((b"STATE", b"EXPECT", *pairs)))
        if not lane.is_ready or not lane.has_room(len(words)):
            lane.connect()
            return False
        self.replies, self.wants = [], len(words)
        self.deadline_s, self.protocol = self.upstreams.deadline_s(is_long), protocol
        lane.send(b"".join(words), self)
        return True

    def take(self, replies: Sequence[bytes], told: Told) -> None:
        """Take the next answers."""
        self.wants -= len(replies)
        self.replies += replies
        if not self.wants and self.is_complete:
            self.whose.answered()

    def fail_all(self, error: Exception) -> None:
        """Pass on what was raised."""
        self.whose.fail(0, error)

    def fail(self, index: int, error: Exception) -> None:
        self.whose.fail(0, error)

    def next_ask(self) -> Ask:
        """Return a question that brings the next answer, if it is an error or will never come.

        Where it is asked again alone, that is a PING: part of a transaction is of no use.
        """
        self.wants -= 1
        ask = Ask(PING, 0, self.protocol, self.deadline_s, self, 0, self.address)
        ask.sends = SENDS_MAX
        return ask

    def put(self, index: int, reply: bytes, told: Told = NOT_TOLD) -> None:
        """Take the answer to such a question."""
        self.replies.append(reply)
        if not self.wants and self.is_complete:
            self.whose.answered()

    @property
    def is_complete(self) -> bool:
        """Tell whether all answers are there."""
        return len(self.replies) == len(self.packed) + 3 + bool(self.watched)

    @property
    def answer(self) -> bytes:
        """EXEC's."""
        return self.replies[-1]

    @property
    def error(self) -> bytes | None:
        """The first error; within EXEC's answer only one that says that a slot is elsewhere, or not ready."""
        found = next((each for each in self.replies if each[:1] == b"-"), None)
        if found is not None or b"\r\n-" not in self.answer:
            return found
        return next((each for each in items_of(self.answer) if each.startswith((b"-MOVED ", *NOT_YET))), None)


class TransactionRun(Step):
    """One EXEC of a client."""

    def __init__(
        self,
        dispatcher: ProxyDispatcher,
        applications: Applications,
        call: Call,
        requests: Sequence[Request],
        watched: dict[tuple[int, bytes], Mark],
        whose: TakesReplies,
        index: int,
    ) -> None:
        super().__init__(whose, index)
        self._dispatcher, self._applications, self._call = dispatcher, applications, call
        self._requests, self._watched = requests, watched
        self._protocol = call.session.protocol
        self._deadline_s = applications.each[0].deadline_s(is_long=len(requests) > SHORT_COMMANDS_MAX)
        self._blocks: dict[tuple[int, str], Block] = {}
        self._planned: list[Planned] = []
        self._left: Iterator[Planned] = iter(())  # of the plan, when the servers have answered
        self._replies: list[bytes] = []
        # Of each application: the epochs to read at, and the jobs that each of its servers shows.
        self._epochs: dict[int, dict[str, Reached]] = {}
        self._jobs: dict[str, set[str]] = {}
        self._waiting = 0
        self._losses = 0
        self._pause_s = PAUSE_S

    def start(self) -> None:
        """Ask the servers."""
        self.attempt(self._start)

    def take_in(self, index: int, reply: bytes, told: Told) -> None:
        """Take an error of the proxy's own."""
        self.end(reply, told)

    def _start(self) -> None:
        self._blocks.clear()
        try:
            self._planned = [self._plan(request) for request in self._requests]
            for (db, key), mark in self._watched.items():
                if db == 0:  # the others are empty, and stay so
                    self._block_of(key).watched[key] = mark
        except ReplyError as error:
            self.end(b"-%b\r\n" % error.line)
            return
        for number, _ in self._blocks:
            self._choose(number)
        self._send()

    def _plan(self, request: Request) -> Planned:
        command = self._dispatcher.command(request)
        if way_of(command) is not Way.KEYS or self._call.session.db != 0:
            return Planned(request)
        found = split(command.facts, request, self._dispatcher.place_of)
        if found is None:
            return Planned(request)
        if command.name == "sort_ro":
            try:
                check_request(self._call.user, request)
            except ReplyError as error:
                return Planned(request, error=error)
        parts, merge = found
        asked = [(self._block_at(*cast("tuple[int, int]", part.place)), part.request) for part in parts]
        return Planned(request, [Part(block, block.add(each)) for block, each in asked], merge)

    def _block_of(self, key: bytes) -> Block:
        return self._block_at(*self._dispatcher.place_of(key))

    def _block_at(self, number: int, slot: int) -> Block:
        upstreams = self._applications.each[number]
        master = upstreams.slots.owners[slot]
        if master is None:
            raise ClusterDownError
        address = upstreams.answering(master)
        block = self._blocks.get((number, address))
        if block is None:
            block = self._blocks[number, address] = Block(upstreams, address, self)
        return block

    def _choose(self, number: int) -> None:
        """Choose the newest epochs that any server of an application has told of, unless that was done."""
        if number not in self._epochs:
            self._epochs[number] = dict(self._applications.each[number].newest)

    def _send(self) -> None:
        clock_ms = self._call.instance.clock()
        self._waiting = 1  # so that nothing ends before all were asked
        is_sent = True
        for (number, address), block in self._blocks.items():
            jobs = self._jobs.setdefault(address, set(block.upstreams.seen.get(address, ())))
            epochs = {job: reached for job, reached in self._epochs[number].items() if job in jobs}
            self._waiting += 1
            if not block.send(epochs, clock_ms, self._protocol):
                self._waiting -= 1
                is_sent = False
        self._waiting -= 1
        if not is_sent:
            names = ", ".join(address for _, address in self._blocks)
            self._again(f"not all of {names} can be reached", self._send_again)
        elif not self._waiting:
            self._finish()

    def _send_again(self) -> None:
        if self._waiting:  # what was sent is not answered yet: it would be answered twice
            self._again("no server answered in time", self._send_again)
        else:
            self.start()

    def answered(self) -> None:
        """Take in that a server has answered all."""
        self._waiting -= 1
        if not self._waiting and all(block.is_complete for block in self._blocks.values()):
            self.attempt(self._finish)

    # -- what they answered -------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """End with the reply, or ask again."""
        try:
            self._take_answers()
        except MISREAD as error:
            self.end(not_understood(error))

    def _take_answers(self) -> None:
        failed = [each for each in self._blocks.values() if each.error is not None or each.answer[:1] not in b"*_"]
        if not failed:
            self._take_replies()
            return
        for block in failed:
            if block.answer.startswith(b"-NOTHELD "):
                self._take_held(block)
            elif not self._is_passing(block):
                self.end(block.error or b"-%b\r\n" % PlainError("the transaction was not answered").line)
                return
        self._again("the servers have no epoch in common", self.start)

    def _is_passing(self, block: Block) -> bool:
        """Tell whether to ask again: where the slots are elsewhere by now, or not ready, or a connection was lost."""
        error = block.error or b""
        if error.startswith(b"-MOVED "):
            block.upstreams.refresh(block.address)
            return True
        if error.startswith(NOT_YET):
            return True
        self._losses += 1
        return block.answer[:6] != b"-EXECA" and self._losses <= LOSSES_MAX

    def _take_held(self, block: Block) -> None:
        """Learn which epochs a server holds: read at the next one that it has, where it passed the one asked for by."""
        number = next(number for (number, address) in self._blocks if address == block.address)
        epochs, held = self._epochs[number], held_in(block.answer)
        self._jobs[block.address] = set(held)
        for job, reached in held.items():
            if job not in epochs:
                epochs[job] = reached[-1]
            elif epochs[job] not in reached:
                epochs[job] = min((each for each in reached if each > epochs[job]), default=epochs[job])

    def _again(self, reason: str, then: Callable[[], None]) -> None:
        now_s = self._applications.each[0].now_s
        if now_s + self._pause_s > self._deadline_s:
            self.end(b"-%b\r\n" % TryAgainError(reason).line)
            return
        asyncio.get_running_loop().call_later(self._pause_s, self.attempt, then)
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)

    def _take_replies(self) -> None:
        """Make the reply of the servers', unless a watched key changed."""
        if any(block.answer == NOTHING_RUN[self._protocol] for block in self._blocks.values()):
            self.end(NOTHING_RUN[self._protocol], tuple(self._epochs.values()))
            return
        self._items = {id(block): items_of(block.answer) for block in self._blocks.values()}
        self._left = iter(self._planned)
        self._go_on()

    def _go_on(self, reply: bytes | None = None) -> None:
        """Take the reply that was waited for, if one was, and make the next ones, up to another that is waited for."""
        if reply is not None:
            self._replies.append(reply)
        for planned in self._left:
            if planned.error is not None:
                self._replies.append(self._dispatcher.error_reply(planned.error))
                continue
            if planned.merge is None:
                queued = QueuedCall(self._call.session, self._call.instance, self._call.jobs)
                own = self._dispatcher.answer_within(queued, planned.request)
                if isinstance(own, Pending):
                    self._dispatcher.when_there(queued, own, partial(self.attempt, self._go_on))
                    return
                self._replies.append(own)
                continue
            found = [self._items[id(part.block)][part.number] for part in planned.parts]
            error = next((each for each in found if each[:1] == b"-"), None)
            self._replies.append(planned.merge(found) if error is None else error)
        self.end(b"*%d\r\n%b" % (len(self._replies), b"".join(self._replies)), tuple(self._epochs.values()))


class WatchRun(Step):
    """One WATCH of a client: what its keys are like is asked of their owners, and noted."""

    def __init__(
        self,
        watched: dict[tuple[int, bytes], Mark],
        asked: Sequence[tuple[Upstreams, bytes]],
        whose: TakesReplies,
        index: int,
    ) -> None:
        super().__init__(whose, index)
        self._watched, self._asked = watched, asked
        self._missing = len(asked)
        self._error: bytes | None = None

    def ask(self) -> None:
        """Ask the owners of the keys."""
        for at, (upstreams, key) in enumerate(self._asked):
            packed = pack((b"STATE", b"MARK", key))
            upstreams.send(Ask(packed, slot_of(key), 2, upstreams.deadline_s(), self, at))

    def take_in(self, index: int, reply: bytes, told: Told) -> None:
        """Take the mark of one key."""
        try:
            if reply[:1] == b"-":
                self._error = self._error or reply
            else:
                self._watched[0, self._asked[index][1]] = Mark.parse(reply.partition(b"\r\n")[2][:-2])
        except MISREAD as error:
            self._error = self._error or not_understood(error)
        self._missing -= 1
        if not self._missing:
            self.end(self._error or b"+OK\r\n")


def held_in(reply: bytes) -> dict[str, list[Reached]]:
    """Return which epochs of each job a server holds, by its NOTHELD: the newest last."""
    words = reply[:-2].decode("utf-8", "surrogateescape").split(" ")[1:]
    rows = zip(words[::2], words[1::2], strict=True)
    return {job: [_reached(each) for each in epochs.split(",")] for job, epochs in rows}


def _reached(text: str) -> Reached:
    term, _, epoch = text.partition(":")
    return int(term), int(epoch)


def _named(epochs: dict[str, Reached]) -> list[bytes]:
    return [
        each
        for job, (term, epoch) in epochs.items()
        for each in (job.encode("utf-8", "surrogateescape"), b"%d" % term, b"%d" % epoch)
    ]
