"""The change feed of a job: every change of every committed epoch, in order, as a stream of entries.

    id          fields
    <ms>-<n>    op, epoch, state, key, then those of the change

`ms` is the epoch's `feed_ms` (see `log.feed_mark`), `n` the entry's number in the epoch, from 1: first the epoch's
head, `reset` and `replace`, then the changes, in the order in which they are applied.

    op        of                    more fields
    reset     a later generation    reason; no state and no key: the state begins anew
    replace   a state               no key: its keys that are not put after it in this epoch are gone
    put       a key                 value; of a map a field `.name` for each of its fields; of a list, a set or a sorted
                                    set `value` as JSON
              a field, a member     field; value, except of a set
    delete    a key, or its field   field
    clear     a key
    append    a list's element      value
    fold      a key, or its field   field; operator, operand

`expires` is the time at which a key or field that was put expires, in milliseconds since 1970 UTC. In JSON of bytes
that are no text, `value_hex` is in place of `value`.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from state_backend.codec import keep_by_order, packed_list, packed_map, packed_sorted
from state_backend.history.whole_values import WholeValue, value_in_json
from state_backend.log.change_log import CurrentGeneration, JobLog
from state_backend.log.epochs import ChangeFile, Epoch, runs_in
from state_backend.log.feed_mark import NO_ENTRY, FeedId, FeedMark, is_listed
from state_backend.model.descriptor import Kind, StateDescriptor
from state_backend.model.errors import LogCorruptError
from state_backend.model.records import Change, Op, changes_in

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

# Epochs whose place in the feed is kept in memory, some kilobytes each (guess); others are read again.
EPOCHS_KEPT_MAX = 2_000
# Rows that are decoded at a time: a reader of few entries does not pay for a run (guess).
ROWS_AT_A_TIME = 500

OP_NAMES = {op: op.name.lower().encode() for op in Op}
LAST_ID = FeedId((1 << 64) - 1, (1 << 64) - 1)


class Entry(NamedTuple):
    """An entry: its id, and its fields and their values in turn."""

    id: FeedId
    fields: Sequence[bytes]


class Span(NamedTuple):
    """The entries from one id to another, both included, of the epochs up to `until`; of one state or of all."""

    start: FeedId
    end: FeedId
    until: int
    state: str | None = None


class FeedFacts(NamedTuple):
    """The facts of a feed up to an epoch.

    Args:
        added: All entries of the generation, also those that are no longer in the log.
        last: The id of the last entry, of any state.
        deleted: The id of the last entry that is no longer in the log; 0-0: nothing was removed.
    """

    length: int
    added: int
    last: FeedId
    deleted: FeedId


class Feed:
    """Reads the feed of one generation of a job. Not thread-safe."""

    def __init__(self, log: JobLog, current: CurrentGeneration) -> None:
        self._log = log
        self._current = current
        self._kept: OrderedDict[int, Epoch] = OrderedDict()
        self._states: dict[int, Mapping[str, StateDescriptor]] = {}
        self._first = -1
        self._file: tuple[str, pa.RecordBatchFileReader] | None = None  # the last one that was opened

    def entries(self, span: Span, *, is_reversed: bool = False) -> Iterator[Entry]:
        """Iterate over entries, a few rows of a run at a time; `is_reversed`: from the last one to the first."""
        numbers = self._numbers(span.until)
        chosen = numbers[
            bisect_left(numbers, span.start.ms, key=self._ms) : bisect_right(numbers, span.end.ms, key=self._ms)
        ]
        for number in reversed(chosen) if is_reversed else chosen:
            mark = self._mark(number)
            if mark is None or not mark.entries:
                continue
            first = span.start.n if mark.feed_ms == span.start.ms else 1
            last = span.end.n if mark.feed_ms == span.end.ms else mark.entries
            yield from self._entries_of(number, range(max(first, 1), last + 1), span.state, is_reversed)

    def facts(self, until: int, state: str | None = None) -> FeedFacts:
        """Return the facts of the feed. The length of a state's feed takes reading all its changes."""
        numbers = self._numbers(until)
        marks = (self._mark(numbers[0]), self._mark(numbers[-1])) if numbers else (None, None)
        first, last = marks
        if first is None or last is None:
            return FeedFacts(0, 0, NO_ENTRY, NO_ENTRY)
        length, added = max(0, last.total - first.total + first.entries), last.total
        if state is not None:
            length = added = sum(1 for _ in self.entries(Span(NO_ENTRY, LAST_ID, until, state)))
        return FeedFacts(length, added, last.end, first.after)

    def _numbers(self, until: int) -> range:
        """Return the numbers of the epochs in the feed: those that the log still has, from the first one with a mark.

        Epochs without a mark in between, of an older version that wrote for a while, have no entries.
        """
        floor = self._log.floor(self._current.generation)
        if self._first < floor:
            first = self._log.first(self._current)
            begin = until + 1 if first is None else first.epoch
            numbers = range(begin, until + 1)
            self._first = begin + bisect_left(numbers, True, key=lambda number: self._mark(number) is not None)
        return range(self._first, until + 1)

    def _ms(self, number: int) -> int:
        epoch = self._epoch(number)
        if epoch is None:
            return -1
        return epoch.clock_ms if epoch.feed is None else epoch.feed.feed_ms

    def _mark(self, number: int) -> FeedMark | None:
        epoch = self._epoch(number)
        return None if epoch is None else epoch.feed

    def _epoch(self, number: int) -> Epoch | None:
        """Return an epoch without its inline changes; None if it was swept."""
        kept = self._kept
        if number not in kept:
            epoch = self._log.epoch(self._current, number)
            if epoch is None:
                return None
            kept[number] = replace(epoch, inline=())
            if len(kept) > EPOCHS_KEPT_MAX:
                kept.popitem(last=False)
        kept.move_to_end(number)
        return kept[number]

    def _entries_of(self, number: int, numbers: range, state: str | None, is_reversed: bool) -> Iterator[Entry]:
        """Iterate over the entries of an epoch with some numbers; none if it was swept meanwhile."""
        epoch = self._log.epoch(self._current, number)
        if epoch is None or epoch.feed is None:
            return
        ms, head = epoch.feed.feed_ms, _head(epoch)
        shown = [
            Entry(FeedId(ms, n), fields)
            for n, (of, fields) in enumerate(head, 1)
            if n in numbers and (state is None or of in (None, state))
        ]
        states = self._states_of(epoch)
        if not is_reversed:
            yield from shown
        places = range(numbers.start - len(head) - 1, numbers.stop - len(head) - 1)
        epoch_text = b"%d" % number
        try:
            for place, change in self._changes(epoch, places, state, is_reversed):
                fields = _fields(change, states[change.state], epoch_text)
                yield Entry(FeedId(ms, len(head) + 1 + place), fields)
        except LogCorruptError:
            if self._log.floor(self._current.generation) <= number:
                raise
        if is_reversed:
            yield from reversed(shown)

    def _changes(
        self, epoch: Epoch, places: range, state: str | None, is_reversed: bool
    ) -> Iterator[tuple[int, Change]]:
        """Iterate over the changes at some places of an epoch, as (place, change), that the feed lists."""
        runs = self._runs(epoch)
        for begin, rows, run in reversed(runs) if is_reversed else runs:
            if begin + rows <= places.start or begin >= places.stop:
                continue
            batch = run()
            chosen = _rows_of(batch, state)
            low, high = chosen.searchsorted([places.start - begin, places.stop - begin])
            for at in _parts(low, high, is_reversed):
                part = chosen[at.start : at.stop]
                changes = list(changes_in(batch.take(part)))
                found = list(zip((part + begin).tolist(), changes, strict=True))
                yield from reversed(found) if is_reversed else found

    def _runs(self, epoch: Epoch) -> list[tuple[int, int, Callable[[], pa.RecordBatch]]]:
        """Return the runs of an epoch in their order: the place of the first change, their number, and a reader."""
        found: list[tuple[int, int, Callable[[], pa.RecordBatch]]] = []
        begin = 0
        for file in epoch.files:
            for index, (_, _, rows) in enumerate(file.runs):
                found.append((begin, rows, partial(self._run, epoch, file, index)))
                begin += rows
        for run in (run for stream in epoch.inline for run in runs_in(stream)):
            found.append((begin, run.num_rows, partial(_itself, run)))
            begin += run.num_rows
        return found

    def _run(self, epoch: Epoch, file: ChangeFile, index: int) -> pa.RecordBatch:
        """Read a run of a file. The file stays open: opening it again would check its checksum again."""
        if self._file is None or self._file[0] != file.name:
            folder = self._log.changes_folder(self._current.generation)
            self._file = (file.name, self._log.open_changes(folder, epoch, file))
        return self._file[1].get_batch(index)

    def _states_of(self, epoch: Epoch) -> Mapping[str, StateDescriptor]:
        """Return the states that an epoch may name, by its version of their description."""
        if epoch.description not in self._states:
            newest = self._log.terms.newest()
            for term in self._log.terms.down_from(0 if newest is None else newest.term):
                described = term.description
                if term.generation == self._current.generation and described is not None:
                    states = {state.name: state for state in described.all_states}
                    self._states.setdefault(described.version, states)
        return self._states[epoch.description]


def _itself(run: pa.RecordBatch) -> pa.RecordBatch:
    return run


def _rows_of(run: pa.RecordBatch, state: str | None) -> npt.NDArray[np.int64]:
    """Return the numbers of a run's rows that the feed lists: those of a state, or of all that it shows."""
    import numpy as np

    states = run.column("state")
    names = states.dictionary.to_pylist()
    is_shown = np.array([is_listed(name) and state in (None, name) for name in names], bool)
    return np.flatnonzero(is_shown[np.asarray(states.indices)])


def _parts(low: int, high: int, is_reversed: bool) -> Iterator[range]:
    """Cut a range into parts of ROWS_AT_A_TIME, in their order or from the last to the first."""
    parts = range(low, high, ROWS_AT_A_TIME)
    for begin in reversed(parts) if is_reversed else parts:
        yield range(begin, min(begin + ROWS_AT_A_TIME, high))


def _head(epoch: Epoch) -> list[tuple[str | None, list[bytes]]]:
    """Return the entries before an epoch's changes, as (state or None, fields)."""
    assert epoch.feed is not None
    number = b"%d" % epoch.epoch
    head: list[tuple[str | None, list[bytes]]] = []
    if epoch.feed.reset is not None:
        head.append((None, [b"op", b"reset", b"epoch", number, b"reason", epoch.feed.reset.encode()]))
    replaced = filter(is_listed, epoch.replaces)
    return head + [(name, [b"op", b"replace", b"epoch", number, b"state", name.encode()]) for name in replaced]


def _fields(change: Change, state: StateDescriptor, epoch: bytes) -> list[bytes]:
    """Return the fields of an entry, and their values in turn."""
    op = OP_NAMES[change.op]
    fields = [b"op", op, b"epoch", epoch, b"state", state.name.encode(), b"key", change.key]
    if change.field is not None:
        fields += (b"field", change.field)
    if change.op == Op.FOLD:
        fields += _operation(change, state)
    elif change.op == Op.APPEND or (change.field is not None and change.op == Op.PUT and state.kind is not Kind.SET):
        fields += (b"value", change.value or b"")
    elif change.op == Op.PUT and change.field is None:
        fields += _whole(change.value or b"", state.kind)
    if change.expire_at_ms is not None:
        fields += (b"expires", b"%d" % change.expire_at_ms)
    return fields


def _operation(change: Change, state: StateDescriptor) -> Sequence[bytes]:
    """Return the operator and the operand of a FOLD."""
    operator, value = state.by or state.reduce, change.value or b""
    assert operator is not None
    if state.by is not None:
        _, value = keep_by_order.unpack(change)
    is_whole_map = state.kind is Kind.MAP and change.field is None
    operand = _whole(value, Kind.MAP) if is_whole_map else (b"operand", value)
    return (b"operator", operator.encode(), *operand)


def _whole(value: bytes, kind: Kind) -> Sequence[bytes]:
    """Return the fields of an entry that puts a whole value."""
    whole: WholeValue
    match kind:
        case Kind.MAP:
            return [each for name, text in packed_map.pairs(value) for each in (b"." + name, text)]
        case Kind.LIST:
            whole = packed_list.elements(value)
        case Kind.SET:
            whole = sorted(packed_list.elements(value))
        case Kind.SORTED_SET:
            whole = sorted(packed_sorted.scores_of(value).items(), key=lambda each: (each[1], each[0]))
        case _:
            return (b"value", value)
    made = value_in_json(whole)
    name = "value_hex" if "value_hex" in made else "value"
    return (name.encode(), json.dumps(made[name], ensure_ascii=False).encode())
