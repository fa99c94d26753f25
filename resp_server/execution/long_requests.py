"""Long requests: split into portions, each a request of the same command, whose replies are joined.

So all code that iterates over the words (rights, slots, tracking, the command itself) handles a bounded number at a
time, and other clients are answered in between. All portions are checked before the first one runs, and all read one
view. A command whose replies cannot be joined accepts fewer words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from resp_server.command_table.facts import ANY_SLOTS
from resp_server.command_table.key_specs import keys_of
from resp_server.command_table.table import Command
from resp_server.execution.context import CommandContext
from resp_server.execution.exec_runner import ExecContext
from resp_server.protocol.errors import CrossSlotError, PlainError
from resp_server.protocol.replies import OK, FirstOf, Frames, Reply, Sliced
from resp_server.protocol.request_parser import PORTION_WORDS, PORTION_WORDS_BYTES, LongRequest, Request
from resp_server.session.subscriptions import SUBSCRIPTIONS_MAX, Subscriptions, Way
from resp_server.session.transaction import WATCHED_KEYS_MAX, check_room_to_watch
from state_backend.model.slots import slot_of

# The longest request that is not split (guess: enough for a typed one, or for a few hundred keys).
WHOLE_WORDS_MAX = 4096
WHOLE_BYTES_MAX = 2 << 20

# Raises the error of a portion that may not run.
Check = Callable[[CommandContext, Command, Request], None]
# Called after each portion that ran.
Note = Callable[[Request], None]


class RequestSplit(NamedTuple):
    """How a command's request is split, and how the replies are joined.

    kept: the number of words after the name that each portion repeats. is_counted: the last of them is the number of
    the words after it. check_room: raises PlainError if there are too many words in all.
    """

    shape: type
    kept: int = 0
    is_counted: bool = False
    check_room: Callable[[CommandContext, Sequence[bytes]], None] = lambda context, words: None

    def portions(self, command: Command, request: Request, words: int = PORTION_WORDS) -> Iterator[Request]:
        """Split a request into portions of so many words."""
        start = command.words + self.kept
        head = request[:start]
        for at in range(start, len(request), words):
            for some in of_bounded_size(request[at : at + words]):
                kept = [*head[:-1], b"%d" % len(some)] if self.is_counted else head
                yield [*kept, *some]


def of_bounded_size(words: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Split words into parts of bounded size."""
    if sum(map(len, words)) <= PORTION_WORDS_BYTES:
        yield words
        return
    some: list[bytes] = []
    size = 0
    for word in words:
        some.append(word)
        size += len(word)
        if size > PORTION_WORDS_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def head_of(request: Request) -> Request:
    """Return the first words of a long request, which are checked first; a short request as it is."""
    if is_whole(request):
        return request
    return next(of_bounded_size(request[:PORTION_WORDS]))


def is_whole(request: Request) -> bool:
    """Tell whether a request may run, or be queued, without being split."""
    if type(request) is not LongRequest:
        return True
    return len(request) <= WHOLE_WORDS_MAX and request.size_bytes <= WHOLE_BYTES_MAX


def _room_of(way: Way) -> Callable[[CommandContext, Sequence[bytes]], None]:
    def check(context: CommandContext, names: Sequence[bytes]) -> None:
        subscriptions = context.session.subscriptions or Subscriptions()
        if len(names) <= SUBSCRIPTIONS_MAX:
            subscriptions.check_room(way, names)
        else:
            raise subscriptions.no_room()

    return check


def _room_to_watch(context: CommandContext, keys: Sequence[bytes]) -> None:
    watched, db = context.session.watched, context.session.db
    if len(keys) <= WATCHED_KEYS_MAX:
        keys = [key for key in dict.fromkeys(keys) if (db, key) not in watched]
    check_room_to_watch(watched, keys)


_FIELDS = RequestSplit(list, 3, is_counted=True)
SPLITS: Mapping[str, RequestSplit] = {
    **dict.fromkeys(("exists", "touch"), RequestSplit(int)),
    **dict.fromkeys(("mget", "state|mget"), RequestSplit(list)),
    **dict.fromkeys(("hmget", "smismember", "zmscore", "geopos", "geohash"), RequestSplit(list, 1)),
    **dict.fromkeys(("httl", "hpttl", "hexpiretime", "hpexpiretime"), _FIELDS),
    **{f"{way.value.decode()}subscribe": RequestSplit(Frames, check_room=_room_of(way)) for way in Way},
    **{f"{way.value.decode()}unsubscribe": RequestSplit(Frames) for way in Way},
    "watch": RequestSplit(FirstOf, check_room=_room_to_watch),
    "state|expect": RequestSplit(FirstOf),
}


def split_of(command: Command, request: Request) -> RequestSplit | None:
    """Return how a long request is split; None: it is not. PlainError if it is too long for that."""
    cut = SPLITS.get(command.name)
    if cut is not None and not (cut.is_counted and not _is_counted(command, cut, request)):
        return cut
    if not is_whole(request):
        raise too_long(command)
    return None


def too_long(command: Command, words_max: int = WHOLE_WORDS_MAX) -> PlainError:
    """Return the error for a request that is too long and cannot be split."""
    name = command.name.replace("|", " ")
    return PlainError(f"'{name}' takes {words_max} words of {WHOLE_BYTES_MAX >> 20} MiB at once; split the request")


def _is_counted(command: Command, cut: RequestSplit, request: Request) -> bool:
    start = command.words + cut.kept
    return request[start - 1] == b"%d" % (len(request) - start)


def in_portions(
    context: CommandContext, command: Command, cut: RequestSplit, request: Request, check: Check, note: Note
) -> Sliced:
    """Run a long request in portions, on a view of its own."""
    cut.check_room(context, request[command.words + cut.kept :])
    view = context.pin()
    parts = _parts(ExecContext(context.session, context.server, view), command, cut, request, check, note)
    count = len(request) - command.words - cut.kept if cut.shape is list else None
    return Sliced(parts, partial(context.unpin, view), cut.shape, count, acts=cut.shape in (Frames, FirstOf))


def _parts(
    context: ExecContext, command: Command, cut: RequestSplit, request: Request, check: Check, note: Note
) -> Iterator[Sequence[Reply]]:
    yield from _check_slots(context, command, cut, request)
    for portion in cut.portions(command, request):
        check(context, command, portion)
        yield []
    for portion in cut.portions(command, request):
        reply = command.execute(context, [portion])[0]
        note(portion)
        if isinstance(reply, Sliced):
            for part in reply.parts:
                yield [] if cut.shape is FirstOf else part
            reply.release()
        else:
            yield [] if cut.shape is FirstOf else reply if cut.shape is list else [reply]
    if cut.shape is FirstOf:
        yield [OK]


def _check_slots(
    context: CommandContext, command: Command, cut: RequestSplit, request: Request
) -> Iterator[Sequence[Reply]]:
    """Raise CrossSlotError if portions have keys of different slots; those of one portion were checked."""
    if context.server.cluster is None or not command.facts.key_specs or ANY_SLOTS in command.facts.tips:
        return
    slots = set()
    for portion in cut.portions(command, request):
        keys = keys_of(command.facts, portion)
        slots |= {slot_of(key) for key, _ in keys[:1]} if keys else set()
        yield []
    if len(slots) > 1:
        raise CrossSlotError
