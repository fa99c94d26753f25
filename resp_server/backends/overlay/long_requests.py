"""Routes and sends long requests at a proxy with an upstream. Their keys and rights are checked in steps.

A long request is routed before it is dispatched: it waits for the replies to all earlier requests, and is then
dispatched again with its route. A request that the upstream answers alone is sent to it whole. A read with keys of both
backends is split: the upstream gets its keys in one request, and the states' keys are read in chunks, as at a proxy
without an upstream.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from resp_server import native
from resp_server.backends.overlay.route_sender import RouteSender
from resp_server.backends.routing.long_arguments import without_long_arguments
from resp_server.backends.routing.route import WITHOUT_UPSTREAM, Route, SplitRoute, is_in_chunks
from resp_server.backends.servers.long_requests import CHUNK_KEYS, answer_in_chunks
from resp_server.backends.servers.request_split import merge_parts
from resp_server.command.overlay_commands import OverlayCommand
from resp_server.pipeline.admission import check_routed_user
from resp_server.pipeline.batch import BATCH_BYTES_MAX, ReplyBatch
from resp_server.pipeline.context import CommandContext
from resp_server.pipeline.long_requests import UNSPLIT_ARGUMENTS_MAX, request_chunks, too_long
from resp_server.protocol.request_parser import CHUNK_ARGUMENTS, LongRequest, Request
from resp_server.raw_replies.answers import Answer, ask, merge_answers, run_in_steps, start
from resp_server.raw_replies.raw_reply import RawReply, Steps
from resp_server.session.session import Session

# The parts of a read with keys of both backends.
UPSTREAM_PART, OTHERS_PART = 0, 1
# The garbage collector would visit all words of a long request several times, 10 ms each time.
untrack: Callable[[LongRequest], None] = (
    (lambda words: None) if native.client_fields is None else native.client_fields.untrack
)


def is_long(request: Request) -> bool:
    """Return whether a request is routed in steps."""
    return type(request) is LongRequest


def chunks_of(routed: OverlayCommand, request: LongRequest) -> Iterator[Request]:
    """Split a request, without its long words, into requests of the same command, to check their keys."""
    facts = routed.facts
    short = without_long_arguments(request, request.long_at) if request.long_at else request
    if len(facts.key_specs) != 1 or facts.first_key != 1 or facts.last_key != -1:
        yield short  # it has few keys
        return
    for index in range(1, len(request), CHUNK_ARGUMENTS):  # an even number: MSET has pairs
        yield [request[0], *short[index : index + CHUNK_ARGUMENTS]]


class OverlayLongRequests:
    """Routes and sends long requests."""

    def __init__(self, sender: RouteSender) -> None:
        self._sender, self._defer = sender, sender.defer

    async def route_of(self, context: CommandContext, request: LongRequest) -> Route | None:
        """Return a request's route; ReplyError if no backend may answer it."""
        untrack(request)
        while True:
            owners = self._sender.owners.matcher
            route = await run_in_steps(self._decided(context, request), self._defer)
            if owners is self._sender.owners.matcher:
                return route

    def _decided(self, context: CommandContext, request: LongRequest) -> Steps[Route | None]:
        session = context.session
        route = yield from self._sender.router.route_in_steps(request, session.next_db)
        if route is None or type(route) in WITHOUT_UPSTREAM:
            return route
        yield from self.check_rights(context, route.routed, request)
        if session.transaction is not None and is_in_chunks(route):
            if len(request) > UNSPLIT_ARGUMENTS_MAX:
                assert route.routed.command is not None  # only commands of Redis are split
                raise too_long(route.routed.command)  # EXEC could not wait for its chunks
            return self._sender.router.route(request, session.next_db)
        return route

    def check_rights(self, context: CommandContext, routed: OverlayCommand, request: LongRequest) -> Steps[None]:
        """Raise NoPermError if the user may not run a request."""
        if not context.session.user.is_unrestricted:
            for chunk in chunks_of(routed, request):
                check_routed_user(context, routed, chunk)
                yield

    async def answer_in_chunks(
        self, context: CommandContext, route: SplitRoute, request: Request, batch: ReplyBatch
    ) -> Answer:
        """Answer a read with keys of both backends."""
        command, session = route.routed.command, context.session
        assert command is not None  # only commands of Redis are split
        split = command.policy.split
        assert split is not None
        requests, places = await run_in_steps(_split(route, request), self._defer)
        futures = []
        if places[UPSTREAM_PART]:
            upstream, of_upstream = self._sender.upstream_of(session), requests[UPSTREAM_PART]
            sent = partial(upstream.send_request, session.id, session.protocol, route.routed, of_upstream)
            futures.append(ask(sent))
        others = request_chunks(command, split, requests[OTHERS_PART], CHUNK_KEYS)
        send_chunk = partial(self._send_chunk, session)
        futures.append(start(answer_in_chunks(others, send_chunk, split, session.protocol, BATCH_BYTES_MAX)))

        def merge(replies: Sequence[RawReply]) -> RawReply | Steps[RawReply]:
            return merge_parts(route.routed.policy, replies, places[-len(replies) :])

        return await merge_answers(futures, merge, self._defer)

    def _send_chunk(self, session: Session, chunk: Request) -> ReplyBatch:
        route = self._sender.router.route(chunk, session.db)
        assert route is not None  # the command is known
        batch = self._sender.new_batch(session)
        self._sender.send(route, chunk, session, batch)
        batch.seal()
        return batch


def _split(
    route: SplitRoute, request: Request
) -> Steps[tuple[tuple[LongRequest, LongRequest], tuple[array[int], array[int]]]]:
    """Return the requests with the upstream's keys and with the others, and the places of the keys in the reply."""
    is_other = bytearray(len(request))
    for first in range(0, len(route.state_keys), CHUNK_ARGUMENTS):
        for at in route.state_keys[first : first + CHUNK_ARGUMENTS]:
            is_other[at] = 1
        yield
    parts = LongRequest(request[:1], 0), LongRequest(request[:1], 0)
    for part_request in parts:
        untrack(part_request)
    places = array("L"), array("L")  # no lists: to free a million numbers would take too long
    for first in range(1, len(request), CHUNK_ARGUMENTS):
        for at, word in enumerate(request[first : first + CHUNK_ARGUMENTS], first):
            part = is_other[at]
            parts[part].append(word)
            places[part].append(at - 1)
        yield
    return parts, places
