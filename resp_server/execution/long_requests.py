"""Long requests: each is split into portions, which are requests of the same command, and the replies are joined.

All code that iterates over the words (ACL check, slots, tracking, the command itself) handles a bounded number at a
time, and other clients are answered in between. All portions are checked before the first one runs, and all read one
view. A command whose replies cannot be joined accepts fewer words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from resp_server.command.keys import keys_of
from resp_server.command.spec import ANY_SLOTS
from resp_server.command.table import Command
from resp_server.execution.context import CommandContext
from resp_server.execution.exec_runner import ExecContext
from resp_server.protocol.errors import CrossSlotError, PlainError
from resp_server.protocol.replies import OK, FirstOf, Frames, Pending, Reply, Sliced
from resp_server.protocol.request_parser import PORTION_WORDS, PORTION_WORDS_BYTES, LongRequest, Request
from resp_server.session.subscriptions import SUBSCRIPTIONS_MAX, SubscriptionKind, Subscriptions
from resp_server.session.transaction import WATCHED_KEYS_MAX, check_watch_limits
from state_backend.model.slots import slot_of

# The longest request that is not split (guess: enough for a typed one, or for a few hundred keys).
UNSPLIT_WORDS_MAX = 4096
UNSPLIT_BYTES_MAX = 2 << 20

# Raises the error of a portion that may not run.
Check = Callable[[CommandContext, Command, Request], None]
# Called after each portion that ran.
OnPortion = Callable[[Request], None]


class RequestSplit(NamedTuple):
    """How a command's request is split, and how the replies are joined.

    prefix_words: the number of words after the name that each portion repeats. is_counted: the last of them is the
    number of the words after it. check_limits: raises PlainError if the request has too many words.
    """

    shape: type
    prefix_words: int = 0
    is_counted: bool = False
    check_limits: Callable[[CommandContext, Sequence[bytes]], None] = lambda context, words: None

    def portions(self, command: Command, request: Request, words: int = PORTION_WORDS) -> Iterator[Request]:
        """Split a request into portions of so many words."""
        start = command.words + self.prefix_words
        prefix = request[:start]
        for at in range(start, len(request), words):
            for portion in of_bounded_size(request[at : at + words]):
                yield [*prefix[:-1], b"%d" % len(portion), *portion] if self.is_counted else [*prefix, *portion]


def of_bounded_size(words: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Split words into parts of bounded size."""
    if sum(map(len, words)) <= PORTION_WORDS_BYTES:
        yield words
        return
    part: list[bytes] = []
    size = 0
    for word in words:
        part.append(word)
        size += len(word)
        if size > PORTION_WORDS_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def first_portion(request: Request) -> Request:
    """Return the first words of a long request, which are checked first; a short request as it is."""
    if may_run_unsplit(request):
        return request
    return next(of_bounded_size(request[:PORTION_WORDS]))


def may_run_unsplit(request: Request) -> bool:
    """Tell whether a request may run, or be queued, without being split."""
    if type(request) is not LongRequest:
        return True
    return len(request) <= UNSPLIT_WORDS_MAX and request.size_bytes <= UNSPLIT_BYTES_MAX


def _subscription_check(kind: SubscriptionKind) -> Callable[[CommandContext, Sequence[bytes]], None]:
    def check(context: CommandContext, names: Sequence[bytes]) -> None:
        subscriptions = context.session.subscriptions or Subscriptions()
        if len(names) <= SUBSCRIPTIONS_MAX:
            subscriptions.check_limits(kind, names)
        else:
            raise subscriptions.limit_error()

    return check


def _check_watch(context: CommandContext, keys: Sequence[bytes]) -> None:
    watched, db = context.session.watched, context.session.db
    if len(keys) <= WATCHED_KEYS_MAX:
        keys = [key for key in dict.fromkeys(keys) if (db, key) not in watched]
    check_watch_limits(watched, keys)


_FIELDS = RequestSplit(list, 3, is_counted=True)
SPLITS: Mapping[str, RequestSplit] = {
    **dict.fromkeys(("exists", "touch"), RequestSplit(int)),
    **dict.fromkeys(("mget", "state|mget"), RequestSplit(list)),
    **dict.fromkeys(("hmget", "smismember", "zmscore", "geopos", "geohash"), RequestSplit(list, 1)),
    **dict.fromkeys(("httl", "hpttl", "hexpiretime", "hpexpiretime"), _FIELDS),
    **{
        f"{kind.value.decode()}subscribe": RequestSplit(Frames, check_limits=_subscription_check(kind))
        for kind in SubscriptionKind
    },
    **{f"{kind.value.decode()}unsubscribe": RequestSplit(Frames) for kind in SubscriptionKind},
    "watch": RequestSplit(FirstOf, check_limits=_check_watch),
    "state|expect": RequestSplit(FirstOf),
}


def split_of(command: Command, request: Request) -> RequestSplit | None:
    """Return how a long request is split; None: it runs unsplit. PlainError if it is too long for that."""
    split = SPLITS.get(command.name)
    if split is not None and not (split.is_counted and not _is_counted(command, split, request)):
        return split
    if not may_run_unsplit(request):
        raise too_long(command)
    return None


def too_long(command: Command, words_max: int = UNSPLIT_WORDS_MAX) -> PlainError:
    """Return the error for a request that is too long and cannot be split."""
    name = command.name.replace("|", " ")
    bytes_max = f"{UNSPLIT_BYTES_MAX >> 20} MiB"
    return PlainError(f"'{name}' takes {words_max} arguments of {bytes_max} at once; split the request")


def _is_counted(command: Command, split: RequestSplit, request: Request) -> bool:
    start = command.words + split.prefix_words
    return request[start - 1] == b"%d" % (len(request) - start)


def in_portions(
    context: CommandContext,
    command: Command,
    split: RequestSplit,
    request: Request,
    check: Check,
    on_portion: OnPortion,
) -> Sliced:
    """Run a long request in portions, on a view of its own."""
    split.check_limits(context, request[command.words + split.prefix_words :])
    view = context.pin()
    chunks = _portion_replies(
        ExecContext(context.session, context.server, view), command, split, request, check, on_portion
    )
    count = len(request) - command.words - split.prefix_words if split.shape is list else None
    return Sliced(chunks, partial(context.unpin, view), split.shape, count, has_effect=split.shape in (Frames, FirstOf))


def _portion_replies(
    context: ExecContext, command: Command, split: RequestSplit, request: Request, check: Check, on_portion: OnPortion
) -> Iterator[Sequence[Reply] | Pending]:
    yield from _check_slots(context, command, split, request)
    for portion in split.portions(command, request):
        check(context, command, portion)
        yield []
    for portion in split.portions(command, request):
        reply = command.execute(context, [portion])[0]
        on_portion(portion)
        if isinstance(reply, Sliced):
            for chunk in reply.chunks:
                yield [] if split.shape is FirstOf else chunk
            reply.release()
        elif isinstance(reply, Pending):
            yield reply
        else:
            yield [] if split.shape is FirstOf else reply if split.shape is list else [reply]
    if split.shape is FirstOf:
        yield [OK]


def _check_slots(
    context: CommandContext, command: Command, split: RequestSplit, request: Request
) -> Iterator[Sequence[Reply]]:
    """Raise CrossSlotError if portions have keys of different slots; those of one portion were checked."""
    if context.server.cluster is None or not command.facts.key_specs or ANY_SLOTS in command.facts.tips:
        return
    slots = set()
    for portion in split.portions(command, request):
        keys = keys_of(command.facts, portion)
        slots |= {slot_of(key) for key, _ in keys[:1]} if keys else set()
        yield []
    if len(slots) > 1:
        raise CrossSlotError
