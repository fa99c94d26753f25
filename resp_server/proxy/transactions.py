"""MULTI ... EXEC over keys of several servers, at one epoch of each job; and WATCH.

The proxy queues; EXEC goes to each owner as one block, in one write, that names the epochs to read at and the keys that
must not have changed:

    STATE EXPECT key mark ...   STATE AT job term epoch ... clock   MULTI   its commands ...   EXEC

The epoch of a job is the newest that any server has told of, so that no client sees it go back. Servers that had it go
by hold it for a moment; one that has yet to reach it, or that passed it by, says so, and all are asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, cast

from resp_server.commands.sort import check_request
from resp_server.execution.context import CommandContext
from resp_server.execution.exec_runner import NOTHING_RUN, ExecContext
from resp_server.protocol.errors import ClusterDownError, PlainError, ReplyError, TryAgainError
from resp_server.protocol.replies import Pending
from resp_server.protocol.request_parser import Request
from resp_server.proxy.applications import Applications
from resp_server.proxy.raw_replies import Answer, Steps, answer_of, done, is_error, split_off_head, whole
from resp_server.proxy.reply_splitter import items_of, pack
from resp_server.proxy.request_policy import Way, splitting, way_of
from resp_server.proxy.requests import (
    ASKS_MAX,
    MISREAD,
    PING,
    SENDS_MAX,
    STEPS_NS_MAX,
    ReplySink,
    Step,
    UpstreamRequest,
    not_understood,
)
from resp_server.proxy.upstream_cluster import NOT_YET, UpstreamCluster
from resp_server.proxy.upstream_connection import ConnectionKey
from resp_server.session.epoch_feed import NOT_TOLD, Reached, Told
from resp_server.session.transaction import Mark
from state_backend.model.slots import slot_of

if TYPE_CHECKING:
    from resp_server.proxy.dispatcher import ProxyDispatcher

# Between two tries, doubled each time: servers apply an epoch some milliseconds apart.
PAUSE_S = 0.005
PAUSE_S_MAX = 0.1
# Losing a connection, or a server, costs a try; more of them mean that something is wrong.
LOSSES_MAX = 2
# More commands than this go where long answers are waited for (guess: they take a server some milliseconds).
SHORT_COMMANDS_MAX = 512
# Commands for one server, into which those with keys of several slots are split (guess: others ask there, too).
COMMANDS_MAX = ASKS_MAX * 9 // 10
# Answers to commands that are looked at in one step (guess: 0.1 ms).
LOOKED_AT_ONCE = 512

MULTI, EXEC = pack((b"MULTI",)), pack((b"EXEC",))


# What becomes of a queued command: a server's block and the command's number in it, for each part that is asked; None:
# it is answered here. Numbers alone, as Python's garbage collector looks at all else that is held.
Parts = tuple[tuple[int, int], ...] | None


@dataclass
class Block(ReplySink):
    """What one server is asked in one write, and its answers so far. Asked again as a whole, or not at all."""

    upstreams: UpstreamCluster
    address: str
    whose: TransactionRun
    packed: list[bytes] = field(default_factory=list)
    watched: dict[bytes, Mark] = field(default_factory=dict)
    replies: list[Answer] = field(default_factory=list)
    items: Sequence[Answer] = ()
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
        lane = self.upstreams.lane(ConnectionKey(self.address, protocol, is_long))
        if len(self.packed) > COMMANDS_MAX:
            raise PlainError(f"a transaction may have {COMMANDS_MAX} commands for one server; split it")
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

    def take(self, replies: Sequence[Answer], told: Told) -> None:
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

    def next_ask(self) -> UpstreamRequest:
        """Return a question that brings the next answer, if it is an error or will never come.

        Where it is asked again alone, that is a PING: part of a transaction is of no use.
        """
        self.wants -= 1
        ask = UpstreamRequest(PING, 0, self.protocol, self.deadline_s, self, 0, self.address)
        ask.sends = SENDS_MAX
        return ask

    def put(self, index: int, reply: Answer, told: Told = NOT_TOLD) -> None:
        """Take the answer to such a question."""
        self.replies.append(reply)
        if not self.wants and self.is_complete:
            self.whose.answered()

    @property
    def is_complete(self) -> bool:
        """Tell whether all answers are there."""
        return len(self.replies) == len(self.packed) + 3 + bool(self.watched)

    @property
    def head(self) -> bytes:
        """The first line of EXEC's answer."""
        return split_off_head(self.replies[-1])[0]

    @property
    def is_dropped(self) -> bool:
        """Tell whether a watched key changed, so that nothing was run."""
        return self.head + b"\r\n" in NOTHING_RUN.values()

    def read(self) -> Steps[bytes | None]:
        """Cut EXEC's answer into items; return the first error, which is none to a client.

        Within the answer that is only one that says that a slot is elsewhere, or not ready.
        """
        found = next(filter(is_error, self.replies), None)
        if found is not None or self.is_dropped:
            return None if found is None else whole(found)
        if self.head[:1] != b"*":
            return b"-%b\r\n" % PlainError("the transaction was not answered").line
        self.items = yield from items_of(self.replies[-1])
        for at in range(0, len(self.items), LOOKED_AT_ONCE):
            yield
            for item in self.items[at : at + LOOKED_AT_ONCE]:
                if is_error(item) and whole(item).startswith((b"-MOVED ", *NOT_YET)):
                    return whole(item)
        return None


class TransactionRun(Step):
    """One EXEC of a client."""

    def __init__(
        self,
        dispatcher: ProxyDispatcher,
        applications: Applications,
        context: CommandContext,
        requests: Sequence[Request],
        watched: dict[tuple[int, bytes], Mark],
        whose: ReplySink,
        index: int,
    ) -> None:
        super().__init__(whose, index)
        self._dispatcher, self._applications, self._context = dispatcher, applications, context
        self._requests, self._watched = requests, watched
        self._put_off = context.server.defer
        self._queued = ExecContext(context.session, context.server, context.jobs)
        self._protocol = context.session.protocol
        self._deadline_s = applications.each[0].deadline_s(is_long=len(requests) > SHORT_COMMANDS_MAX)
        self._blocks: dict[tuple[int, str], Block] = {}
        self._numbers: dict[tuple[int, str], int] = {}  # of the blocks, in their order
        self._planned: list[Parts] = []
        self._errors: dict[int, ReplyError] = {}  # that are answered to queued commands, by their numbers
        self._made: Generator[Pending | None, bytes | None] | None = None  # makes the reply of the servers'
        # Of each application: the epochs to read at, and the jobs that each of its servers shows.
        self._epochs: dict[int, dict[str, Reached]] = {}
        self._jobs: dict[str, set[str]] = {}
        self._waiting = 0
        self._losses = 0
        self._pause_s = PAUSE_S

    def start(self, before: Steps[None]) -> None:
        """Ask the servers. before: what is done first; an error that it raises is the answer."""
        self.attempt(self.go_on, self._checked(before), lambda _: self._start(), self._put_off)

    def take_in(self, index: int, reply: Answer, told: Told) -> None:
        """Take an error of the proxy's own."""
        self.end(reply, told)

    def _checked(self, before: Steps[None]) -> Steps[None]:
        try:
            yield from before
        except ReplyError as error:
            self.end(self._dispatcher.error_reply(error))

    def _start(self) -> None:
        self.attempt(self.go_on, self._plan_all(), lambda _: self._send(), self._put_off)

    def _plan_all(self) -> Steps[None]:
        self._blocks.clear()
        self._numbers.clear()
        self._planned = []
        try:
            for request in self._requests:
                self._planned.append((yield from self._plan(request)))
                yield
            for (db, key), mark in self._watched.items():
                if db == 0:  # the others are empty, and stay so
                    _, block = self._block_at(*self._dispatcher.place_of(key))
                    block.watched[key] = mark
                    yield
        except ReplyError as error:
            self.end(b"-%b\r\n" % error.line)
        for number, _ in self._blocks:
            self._choose(number)

    def _plan(self, request: Request) -> Steps[Parts]:
        command = self._dispatcher.command(request)
        if way_of(command) is not Way.KEYS or self._context.session.db != 0:
            return None
        found = yield from splitting(command.facts, request, self._dispatcher.place_of)
        if found is None:
            return None
        if command.name == "sort_ro":
            try:
                check_request(self._context.user, request)
            except ReplyError as error:
                self._errors[len(self._planned)] = error
                return None
        parts = []
        for part in found[0]:
            number, block = self._block_at(*cast("tuple[int, int]", part.place))
            parts.append((number, block.add(part.request)))
            yield
        return tuple(parts)

    def _block_at(self, application: int, slot: int) -> tuple[int, Block]:
        """Return the block of whoever answers a slot, and its number."""
        upstreams = self._applications.each[application]
        master = upstreams.slots.owners[slot]
        if master is None:
            raise ClusterDownError
        key = application, upstreams.answering(master)
        block = self._blocks.get(key)
        if block is None:
            self._numbers[key] = len(self._blocks)
            block = self._blocks[key] = Block(upstreams, key[1], self)
        return self._numbers[key], block

    def _choose(self, number: int) -> None:
        """Choose the newest epochs that any server of an application has told of, unless that was done."""
        if number not in self._epochs:
            self._epochs[number] = dict(self._applications.each[number].newest)

    def _send(self) -> None:
        if self._is_over:
            return
        clock_ms = self._context.server.clock()
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
            self._start()

    def answered(self) -> None:
        """Take in that a server has answered all."""
        self._waiting -= 1
        if not self._waiting and all(block.is_complete for block in self._blocks.values()):
            self.attempt(self._finish)

    # -- what they answered -------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """End with the reply, or ask again."""
        self.go_on(self._read_all(), self._take_answers, self._put_off)

    def _read_all(self) -> Steps[list[tuple[Block, bytes]]]:
        """Read what the servers answered; return those that did not run their part, and why."""
        failed = []
        try:
            for block in self._blocks.values():
                error = yield from block.read()
                if error is not None:
                    failed.append((block, error))
        except MISREAD as error:
            self.end(not_understood(error))
        return failed

    def _take_answers(self, failed: Sequence[tuple[Block, bytes]]) -> None:
        if self._is_over:
            return
        if not failed:
            self._take_replies()
            return
        for block, error in failed:
            answer = whole(block.replies[-1])
            if answer.startswith(b"-NOTHELD "):
                self._take_held(block, answer)
            elif not self._is_passing(block, error):
                self.end(error)
                return
        self._again("the servers have no epoch in common", self._start)

    def _is_passing(self, block: Block, error: bytes) -> bool:
        """Tell whether to ask again: where the slots are elsewhere by now, or not ready, or a connection was lost."""
        if error.startswith(b"-MOVED "):
            block.upstreams.refresh(block.address)
            return True
        if error.startswith(NOT_YET):
            return True
        self._losses += 1
        return block.head[:6] != b"-EXECA" and self._losses <= LOSSES_MAX

    def _take_held(self, block: Block, answer: bytes) -> None:
        """Learn which epochs a server holds: read at the next one that it has, where it passed the one asked for by."""
        number = next(number for (number, address) in self._blocks if address == block.address)
        epochs, held = self._epochs[number], held_in(answer)
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
        if any(block.is_dropped for block in self._blocks.values()):
            self.end(NOTHING_RUN[self._protocol], tuple(self._epochs.values()))
            return
        self._made = self._make()
        self._go_on()

    def _go_on(self, reply: bytes | None = None) -> None:
        """Take the reply that was waited for, if one was, and go on up to another that is waited for."""
        ends_ns = perf_counter_ns() + STEPS_NS_MAX
        made = self._made
        assert made is not None
        try:
            while True:
                own, reply = made.send(reply), None
                if own is not None:
                    self._dispatcher.when_there(self._queued, own, partial(self.attempt, self._go_on))
                    return
                if perf_counter_ns() >= ends_ns:
                    self._put_off(partial(self.attempt, self._go_on))
                    return
        except StopIteration:
            pass
        except MISREAD as error:
            self.end(not_understood(error))

    def _make(self) -> Generator[Pending | None, bytes | None]:
        """Make the reply of the servers'. Yields what has to be waited for, and is sent it; and None between steps."""
        replies: list[Answer] = []
        blocks = list(self._blocks.values())
        for number, (request, parts) in enumerate(zip(self._requests, self._planned, strict=True)):
            if number in self._errors:
                replies.append(self._dispatcher.error_reply(self._errors[number]))
            elif parts is None:
                own = self._dispatcher.answer_within(self._queued, request)
                if isinstance(own, Pending):
                    there = yield own
                    assert there is not None
                    own = there
                replies.append(own)
            else:
                steps = self._joined(request, [blocks[at].items[place] for at, place in parts])
                while True:
                    try:
                        next(steps)
                    except StopIteration as end:
                        replies.append(end.value)
                        break
                    yield None
            yield None
        reply = answer_of([b"*%d\r\n" % len(replies), *replies])
        self.end(reply, tuple(self._epochs.values()))

    def _joined(self, request: Request, found: Sequence[Answer]) -> Steps[Answer]:
        """Join the answers to the parts of a queued command."""
        error = next(filter(is_error, found), None)
        if error is not None or len(found) == 1:
            return found[0] if error is None else error
        again = yield from splitting(self._dispatcher.command(request).facts, request, self._dispatcher.place_of)
        assert again is not None
        answer: Answer = yield from done(again[1](found))
        return answer


class WatchRun(Step):
    """One WATCH of a client: what its keys are like is asked of their owners, and noted."""

    def __init__(
        self,
        watched: dict[tuple[int, bytes], Mark],
        asked: Sequence[tuple[UpstreamCluster, bytes]],
        whose: ReplySink,
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
            upstreams.send(UpstreamRequest(packed, slot_of(key), 2, upstreams.deadline_s(), self, at))

    def take_in(self, index: int, reply: Answer, told: Told) -> None:
        """Take the mark of one key."""
        try:
            mark = whole(reply)
            if is_error(mark):
                self._error = self._error or mark
            else:
                self._watched[0, self._asked[index][1]] = Mark.parse(mark.partition(b"\r\n")[2][:-2])
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
