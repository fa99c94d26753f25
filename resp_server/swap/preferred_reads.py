"""Reads of keys whose rule is `prefer-state`: the states answer if they have the key, otherwise the upstream does.

Both sides get the request at once, and the states an EXISTS before it. So a client's requests keep their order at each
side, and a read costs one round trip. The upstream's reply is not waited for if the states have the key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from resp_server.command.table import Command
from resp_server.forwarding.raw_replies import RawReply, Steps, is_error
from resp_server.forwarding.reply_splitter import array_in_order, sum_of_replies
from resp_server.forwarding.reply_stages import Defer, ReplyAggregator, ReplySink, ReplyStage
from resp_server.protocol.errors import ReplyError, TryAgainError
from resp_server.protocol.request_parser import Request
from resp_server.proxy.request_policy import SUMMED
from resp_server.session.epoch_feed import ReplyEpochs
from resp_server.upstream.mapped_names import StateRead
from resp_server.upstream.routing import Route

# The parts of a read. Those from `READS` on are the reads of the states.
UPSTREAM, EXISTS, READS = 0, 1, 2
ABSENT = b":0\r\n"
# A read is repeated if an epoch came between its two requests to the states. Twice in a row is rare (guess).
TRIES_MAX = 10


class ClientSenders(NamedTuple):
    """Sends one client's requests to each side; the sink gets the reply. to_states: takes a key of the request, too."""

    to_upstream: Callable[[Request, ReplySink, int], None]
    to_states: Callable[[bytes, Request, ReplySink, int], None]
    defer: Defer


class PreferredRead(ReplyStage):
    """A read of one key. read: the states' part. unserved: the error if they have the key, but do not serve it."""

    def __init__(
        self,
        senders: ClientSenders,
        request: Request,
        read: StateRead,
        unserved: ReplyError | None,
        sink: ReplySink,
        index: int,
    ) -> None:
        super().__init__(sink, index)
        self._senders, self._request, self._read, self._unserved = senders, request, read, unserved
        self._states: dict[int, tuple[RawReply, ReplyEpochs]] = {}
        self._upstream: RawReply | Exception | None = None
        self._tries = 0

    def send(self) -> None:
        """Send the requests."""
        self.attempt(self._senders.to_upstream, self._request, self, UPSTREAM)
        self.attempt(self._ask_states)

    def _ask_states(self) -> None:
        self._tries += 1
        self._states = {}
        for part, request in enumerate([self._read.exists, *self._read.reads], EXISTS):
            self._senders.to_states(self._read.exists[1], request, self, part)

    def receive(self, index: int, reply: RawReply, epochs: ReplyEpochs) -> None:
        if index == UPSTREAM:
            self._upstream = reply
        else:
            self._states[index] = reply, epochs
        self._decide()

    def fail(self, index: int, error: Exception) -> None:
        if index == UPSTREAM:
            self._upstream = error
            self.attempt(self._decide)
        else:
            super().fail(index, error)

    def _decide(self) -> None:
        if EXISTS not in self._states:
            return
        exists, epochs = self._states[EXISTS]
        if is_error(exists):
            self.finish(exists, epochs)
        elif exists == ABSENT:
            if isinstance(self._upstream, Exception):
                super().fail(UPSTREAM, self._upstream)
            elif self._upstream is not None:
                self.finish(self._upstream, epochs)
        elif self._unserved is not None:
            super().fail(EXISTS, self._unserved)
        elif len(self._states) > len(self._read.reads):
            parts = [self._states[part] for part in range(READS, READS + len(self._read.reads))]
            if all(_are_same(epochs, its_epochs) for _, its_epochs in parts):
                self.finish(self._read.reply([reply for reply, _ in parts]), parts[0][1])
            elif self._tries < TRIES_MAX:
                self._ask_states()
            else:
                super().fail(EXISTS, TryAgainError("the state changes too often to be read together"))


def _are_same(first: ReplyEpochs, second: ReplyEpochs) -> bool:
    """Tell whether two replies are from the same epochs."""
    return first == second or not first or not second


class SplitRead:
    """A read of several keys that is split: into those of the upstream, those of the states, and each preferred one."""

    def __init__(self, route: Route, request: Request, senders: ClientSenders) -> None:
        command: Command | None = route.routed.command
        assert command is not None  # `routing.SPLIT` has commands of Redis only
        self._senders, self._request = senders, request if route.request is None else route.request
        others = {*route.state_keys, *route.preferred, *route.fields}
        self._upstream = [at for at in range(1, len(request)) if at not in others]
        self._states, self._preferred, self._fields = route.state_keys, route.preferred, route.fields
        singles = [[at] for at in (*self._preferred, *self._fields)]
        groups = [group for group in (self._upstream, self._states, *singles) if group]
        self._places = [[at - 1 for at in group] for group in groups]
        self._is_sum = SUMMED in command.facts.tips

    def _merge(self, replies: Sequence[RawReply]) -> RawReply | Steps[RawReply]:
        return sum_of_replies(replies) if self._is_sum else array_in_order(replies, self._places)

    def send(
        self, send_to_states: Callable[[Request, ReplyAggregator, int], None], sink: ReplySink, index: int
    ) -> None:
        """Send the parts. send_to_states: sends a request with keys of several slots."""
        request, part = self._request, 0
        both = ReplyAggregator(len(self._places), self._merge, sink, index, self._senders.defer)
        if self._upstream:
            both.attempt(self._senders.to_upstream, self._part(self._upstream), both, part)
            part += 1
        if self._states:
            both.attempt(send_to_states, self._part(self._states), both, part)
            part += 1
        for number, (at, read) in enumerate(self._preferred.items()):
            PreferredRead(self._senders, (request[0], request[at]), read, None, both, part + number).send()
        part += len(self._preferred)
        for number, each in enumerate(self._fields.values()):
            both.attempt(self._senders.to_states, each[1], each, both, part + number)

    def _part(self, positions: Sequence[int]) -> Request:
        return (self._request[0], *(self._request[at] for at in positions))
