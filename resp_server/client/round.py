"""Answers the short requests of all clients of one event loop round together; used only without the compiled core.

A round is one iteration of the event loop. In Python, the function calls of a request cost more than its look-up. So
input is only buffered while the event loop reads the sockets. At the end of the round the view is renewed once, and the
clients are grouped by the command of their requests. The requests of a group are parsed and answered together, and each
client gets its replies in one write. A group may have a single client.

`Connection` answers all other input in turns of one client: incomplete input, long input, and the input of clients that
cannot use the fast path. It also sends the streamed replies. So an error or a long reply affects one client only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import chain, islice, repeat
from time import perf_counter_ns

from resp_server.client.connection import Connection
from resp_server.client.turn_scheduler import LONG_INPUT_BYTES, TurnScheduler
from resp_server.client.write_queue import WriteQueue
from resp_server.pipeline.context import ServerContext
from resp_server.pipeline.immediate import ImmediatePipeline
from resp_server.protocol.request_parser import NAME_OFFSET_MIN, split_together

# At most the replies of so many clients are in memory together (guess: 64 clients with 30 GETs each take 2 ms).
CLIENTS_PER_BATCH = 64


class Round:
    """The clients with input in this round."""

    def __init__(
        self,
        server: ServerContext,
        pipeline: ImmediatePipeline,
        turn_scheduler: TurnScheduler,
        write_queue: WriteQueue,
    ) -> None:
        self._server = server
        self._pipeline = pipeline
        self._turn_scheduler = turn_scheduler
        self._write_queue = write_queue
        self._clients: dict[Connection, None] = {}

    def add(self, client: Connection) -> None:
        """Answer a client's input at the end of the round."""
        if not self._clients:
            asyncio.get_running_loop().call_soon(self.answer)
        self._clients[client] = None

    def answer(self) -> None:
        """Answer all input."""
        clients, self._clients = self._clients, {}
        self._server.attempt(self._answer_groups, clients)
        for client in clients:
            # Input is left if its client is in no group, or after an exception. An exception that one client's input
            # causes is raised again in that client's own turn.
            if client.input.data:
                self._server.attempt(client.answer_in_own_turn)

    def _answer_groups(self, clients: Iterable[Connection]) -> None:
        """Group clients by command, and answer each group; leave the input of clients in no group."""
        now_ns = perf_counter_ns()
        if now_ns >= self._turn_scheduler.fresh_until_ns:
            self._turn_scheduler.refresh(now_ns)
        if self._server.loading_waits.may_occur:
            return
        groups: dict[tuple[bytes, int], list[Connection]] = {}
        for client in clients:
            data, session = client.input.data, client.session
            if client.is_idle and data and session.can_use_fast_path and len(data) <= LONG_INPUT_BYTES:
                prefix = data[: data.find(b"\r\n", NAME_OFFSET_MIN)], session.protocol
                if prefix in groups:
                    groups[prefix].append(client)
                else:
                    groups[prefix] = [client]
        for group in groups.values():
            for first in range(0, len(group), CLIENTS_PER_BATCH):
                self._answer_group(group[first : first + CLIENTS_PER_BATCH])

    def _answer_group(self, clients: Sequence[Connection]) -> None:
        """Answer clients whose first requests have the same command; leave input that also has other commands."""
        counts, requests = split_together([client.input.data for client in clients])
        if 0 in counts:
            clients = [client for client, count in zip(clients, counts, strict=True) if count]
            counts = [count for count in counts if count]
        key_command = self._pipeline.key_command(requests[0][0]) if requests else None
        if key_command is None:
            return
        contexts = [client.context for client in clients]
        if len(requests) > len(clients):
            contexts = list(chain.from_iterable(map(repeat, contexts, counts)))
        while requests:
            replies: list[bytes] = []
            answered, later, _ = self._pipeline.answer_run(contexts, key_command, requests, replies)
            # Earlier output of these clients comes first.
            self._write_queue.flush()
            done = self._send(clients, counts, replies, key_command.command.name)
            if answered == len(requests) and later is None:
                return
            # A streamed or a long reply ended the run. The other requests of its client are answered in its own turns.
            at = sum(counts[:done])
            if answered > at:
                rest = requests[answered : at + counts[done]]
                clients[done].session.calls += answered - at
                clients[done].answer_rest(replies[at:], list(rest), later)
                at, done = at + counts[done], done + 1
            clients, counts, contexts, requests = clients[done:], counts[done:], contexts[at:], requests[at:]

    @staticmethod
    def _send(clients: Sequence[Connection], counts: Sequence[int], replies: list[bytes], command: str) -> int:
        """Send the replies of the first clients whose requests are all answered; return the number of these clients."""
        unsent, left, done = iter(replies), len(replies), 0
        for client, count in zip(clients, counts, strict=True):
            if count > left:
                break
            left -= count
            done += 1
            client.session.calls += count
            client.send_replies(next(unsent) if count == 1 else b"".join(islice(unsent, count)), command)
        return done
