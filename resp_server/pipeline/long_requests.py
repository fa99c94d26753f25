"""Long requests: each is split into chunks, which are requests of the same command, and the replies are joined.

All code that iterates over the arguments (ACL check, slots, tracking, the command itself) handles a bounded number at a
time, and other clients are answered in between. All chunks are checked before the first one runs, and all read one
view. A command whose replies cannot be joined accepts fewer arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from resp_server.command.keys import keys_of
from resp_server.command.policy import ReplyMerge, SpecialCommand, Split, Verb
from resp_server.command.spec import ANY_SLOTS
from resp_server.command.table import Command
from resp_server.pipeline.context import CommandContext, PinnedContext
from resp_server.protocol.errors import CrossSlotError, GenericError
from resp_server.protocol.replies import OK, FirstOf, Frames, Pending, Reply, Sliced
from resp_server.protocol.request_parser import CHUNK_ARGUMENT_BYTES, CHUNK_ARGUMENTS, LongRequest, Request
from resp_server.session.subscriptions import SUBSCRIPTIONS_MAX, SubscriptionKind, Subscriptions
from resp_server.session.transaction import WATCHED_KEYS_MAX, check_watch_limits
from state_backend.model.slots import slot_of

# The longest request that is not split (guess: enough for a typed one, or for a few hundred keys).
UNSPLIT_ARGUMENTS_MAX = 4096
UNSPLIT_BYTES_MAX = 2 << 20

# Raises the error of a chunk that may not run.
Check = Callable[[CommandContext, Command, Request], None]
# Called after each chunk that ran.
OnChunk = Callable[[Request], None]


# The shape of a reply that is joined.
SHAPES: Mapping[ReplyMerge, type] = {
    ReplyMerge.LIST: list,
    ReplyMerge.SUM: int,
    ReplyMerge.FRAMES: Frames,
    ReplyMerge.ONE_OK: FirstOf,
}


def request_chunks(command: Command, split: Split, request: Request, size: int = CHUNK_ARGUMENTS) -> Iterator[Request]:
    """Split a request into chunks of so many arguments."""
    start = command.words + split.prefix_size
    prefix = request[:start]
    for first in range(start, len(request), size):
        for chunk in of_bounded_size(request[first : first + size]):
            yield [*prefix[:-1], b"%d" % len(chunk), *chunk] if split.is_counted else [*prefix, *chunk]


def of_bounded_size(arguments: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Split arguments into chunks of bounded size."""
    if sum(map(len, arguments)) <= CHUNK_ARGUMENT_BYTES:
        yield arguments
        return
    chunk: list[bytes] = []
    size = 0
    for argument in arguments:
        chunk.append(argument)
        size += len(argument)
        if size > CHUNK_ARGUMENT_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def first_chunk(request: Request) -> Request:
    """Return the first arguments of a long request, which are checked first; a short request as it is."""
    if may_run_unsplit(request):
        return request
    return next(of_bounded_size(request[:CHUNK_ARGUMENTS]))


def may_run_unsplit(request: Request) -> bool:
    """Return whether a request may run, or be queued, without being split."""
    if type(request) is not LongRequest:
        return True
    return len(request) <= UNSPLIT_ARGUMENTS_MAX and request.size_bytes <= UNSPLIT_BYTES_MAX


def _check_limits(context: CommandContext, command: Command, names: Sequence[bytes]) -> None:
    """Raise GenericError if a session would have more subscriptions or watched keys than it may have."""
    channels = command.policy.channels
    if channels is not None and channels.verb is Verb.SUBSCRIBE:
        _check_subscriptions(context, SubscriptionKind(channels.kind), names)
    elif command.policy.special is SpecialCommand.WATCH:
        _check_watch(context, names)


def _check_subscriptions(context: CommandContext, kind: SubscriptionKind, names: Sequence[bytes]) -> None:
    subscriptions = context.session.subscriptions or Subscriptions()
    if len(names) > SUBSCRIPTIONS_MAX:
        raise subscriptions.limit_error()
    subscriptions.check_limits(kind, names)


def _check_watch(context: CommandContext, keys: Sequence[bytes]) -> None:
    watched, db = context.session.watched, context.session.db
    if len(keys) <= WATCHED_KEYS_MAX:
        keys = [key for key in dict.fromkeys(keys) if (db, key) not in watched]
    check_watch_limits(watched, keys)


def split_of(command: Command, request: Request) -> Split | None:
    """Return how a long request is split; None: it runs unsplit. GenericError if it is too long for that."""
    split = None if command.facts.is_write else command.policy.split
    if split is not None and not (split.is_counted and not _is_counted(command, split, request)):
        return split
    if not may_run_unsplit(request):
        raise too_long(command)
    return None


def too_long(command: Command, arguments_max: int = UNSPLIT_ARGUMENTS_MAX) -> GenericError:
    """Return the error for a request that is too long and cannot be split."""
    name = command.name.replace("|", " ")
    bytes_max = f"{UNSPLIT_BYTES_MAX >> 20} MiB"
    return GenericError(f"'{name}' takes {arguments_max} arguments of {bytes_max} at once; split the request")


def _is_counted(command: Command, split: Split, request: Request) -> bool:
    start = command.words + split.prefix_size
    return request[start - 1] == b"%d" % (len(request) - start)


def in_chunks(
    context: CommandContext,
    command: Command,
    split: Split,
    request: Request,
    check: Check,
    on_chunk: OnChunk,
) -> Sliced:
    """Run a long request in chunks, on a view of its own."""
    _check_limits(context, command, request[command.words + split.prefix_size :])
    view = context.pin()
    chunks = _chunk_replies(
        PinnedContext(context.session, context.server, view), command, split, request, check, on_chunk
    )
    count = len(request) - command.words - split.prefix_size if split.merge is ReplyMerge.LIST else None
    has_effect = split.merge in (ReplyMerge.FRAMES, ReplyMerge.ONE_OK)
    return Sliced(chunks, partial(context.unpin, view), SHAPES[split.merge], count, has_effect=has_effect)


def _chunk_replies(
    context: PinnedContext, command: Command, split: Split, request: Request, check: Check, on_chunk: OnChunk
) -> Iterator[Sequence[Reply] | Pending]:
    yield from _check_slots(context, command, split, request)
    for chunk in request_chunks(command, split, request):
        check(context, command, chunk)
        yield []
    for chunk in request_chunks(command, split, request):
        reply = command.execute(context, [chunk])[0]
        on_chunk(chunk)
        if isinstance(reply, Sliced):
            for items in reply.chunks:
                yield [] if split.merge is ReplyMerge.ONE_OK else items
            reply.release()
        elif isinstance(reply, Pending):
            yield reply
        else:
            yield [] if split.merge is ReplyMerge.ONE_OK else reply if split.merge is ReplyMerge.LIST else [reply]
    if split.merge is ReplyMerge.ONE_OK:
        yield [OK]


def _check_slots(
    context: CommandContext, command: Command, split: Split, request: Request
) -> Iterator[Sequence[Reply]]:
    """Raise CrossSlotError if chunks have keys of different slots; those of one chunk were checked."""
    if context.server.cluster is None or not command.facts.key_specs or ANY_SLOTS in command.facts.tips:
        return
    slots = set()
    for chunk in request_chunks(command, split, request):
        keys = keys_of(command.facts, chunk)
        slots |= {slot_of(key) for key, _ in keys[:1]} if keys else set()
        yield []
    if len(slots) > 1:
        raise CrossSlotError
