"""Answers the short requests of all clients of one round of the event loop together. Without the compiled core only.

In Python, a short request costs more in calls between the parts than in its look-up. So while the loop reads the
sockets, input is only kept. At the round's end the view is renewed once. Then the requests of all clients that have the
same command are parsed, looked up and answered as one run, and each client gets its replies in one write. A client that
is alone in its round is a run of its own.

A client takes turns of its own (`Connection`) for what is not whole, not plain (`Session.is_plain`) or long, and for
replies in steps. So an error, or a reply of many bytes, is about one client only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import chain, islice, repeat
from time import perf_counter_ns
from typing import Protocol

from resp_server.client.turn_scheduler import LONG_INPUT_BYTES, TurnScheduler
from resp_server.client.write_queue import WriteQueue
from resp_server.execution.context import CommandContext, ServerContext
from resp_server.execution.dispatcher import Dispatcher, Later
from resp_server.protocol.request_parser import NAME_AT_LEAST, Request, split_together
from resp_server.session.session import Session

# Clients whose replies are in memory at the same time (guess: 64 clients with 30 GETs each take 2 ms).
TOGETHER_CLIENTS = 64


class Member(Protocol):
    """A client with input in the round. is_idle: nothing else of it waits, and it takes its replies.

    None of its methods raises.
    """

    session: Session
    context: CommandContext
    input: bytes
    is_idle: bool

    def take_replies(self, replies: bytes, command: str) -> None:
        """Send the replies to all input."""

    def answer_rest(self, out: list[bytes], requests: list[Request], later: Later | None) -> None:
        """Send the first replies, and answer the other requests in turns of its own. later: the reply before theirs."""

    def answer_alone(self) -> None:
        """Answer input that waits for the round in turns of its own."""


class Round:
    """The clients with input in this round."""

    def __init__(
        self, server: ServerContext, dispatcher: Dispatcher, turn_scheduler: TurnScheduler, write_queue: WriteQueue
    ) -> None:
        self._server = server
        self._dispatcher = dispatcher
        self._turn_scheduler = turn_scheduler
        self._write_queue = write_queue
        self._members: dict[Member, None] = {}

    def add(self, member: Member) -> None:
        """Answer a client's input at the end of the round."""
        if not self._members:
            asyncio.get_running_loop().call_soon(self.answer)
        self._members[member] = None

    def answer(self) -> None:
        """Answer all input."""
        members, self._members = self._members, {}
        self._server.attempt(self._answer_together, members)
        for member in members:
            if (
                member.input
            ):  # not answered above, maybe after an exception; if this input causes it, its own turn raises it
                self._server.attempt(member.answer_alone)

    def _answer_together(self, members: Iterable[Member]) -> None:
        """Answer input of plain clients by command; leave the other input."""
        now_ns = perf_counter_ns()
        if now_ns >= self._turn_scheduler.fresh_until_ns:
            self._turn_scheduler.refresh(now_ns)
        if self._server.is_loading:
            return
        alike: dict[tuple[bytes, int], list[Member]] = {}
        for member in members:
            data, session = member.input, member.session
            if member.is_idle and data and session.is_plain and len(data) <= LONG_INPUT_BYTES:
                head = data[: data.find(b"\r\n", NAME_AT_LEAST)], session.protocol
                if head in alike:
                    alike[head].append(member)
                else:
                    alike[head] = [member]
        for those in alike.values():
            for at in range(0, len(those), TOGETHER_CLIENTS):
                self._answer_alike(those[at : at + TOGETHER_CLIENTS])

    def _answer_alike(self, members: Sequence[Member]) -> None:
        """Answer requests of one command; leave input that has others, too."""
        counts, requests = split_together([member.input for member in members])
        if 0 in counts:
            members = [member for member, count in zip(members, counts, strict=True) if count]
            counts = [count for count in counts if count]
        key_command = self._dispatcher.key_command(requests[0][0]) if requests else None
        if key_command is None:
            return
        contexts = [member.context for member in members]
        if len(requests) > len(members):
            contexts = list(chain.from_iterable(map(repeat, contexts, counts)))
        while requests:
            replies: list[bytes] = []
            answered, later, _ = self._dispatcher.answer_run(contexts, key_command, requests, replies)
            self._write_queue.flush()  # what was sent to these clients before comes first
            done = self._send(members, counts, replies, key_command.command.name)
            if answered == len(requests) and later is None:
                return
            # A reply in steps, or one of many bytes, ends a run. What is left of its client's requests is its own.
            at = sum(counts[:done])
            if answered > at:
                own = requests[answered : at + counts[done]]
                members[done].answer_rest(replies[at:], list(own), later)
                at, done = at + counts[done], done + 1
            members, counts, contexts, requests = members[done:], counts[done:], contexts[at:], requests[at:]

    @staticmethod
    def _send(members: Sequence[Member], counts: Sequence[int], replies: list[bytes], command: str) -> int:
        """Send their replies to the first clients that have all of them; return how many those are."""
        rest, left, done = iter(replies), len(replies), 0
        for member, count in zip(members, counts, strict=True):
            if count > left:
                break
            left -= count
            done += 1
            member.take_replies(next(rest) if count == 1 else b"".join(islice(rest, count)), command)
        return done
