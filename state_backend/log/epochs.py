"""The file of an epoch. Its creation commits a micro-batch; it has everything that a reader needs.

`epochs/<epoch>.json` is one JSON object:

    format      1; 2 if the job has a reducing state, 3 if it has a set, 4 if it keeps rows by their order: older
                        versions cannot read their changes
    epoch, term         this epoch's number, and the term of the writer that committed it
    previous            [epoch, term] of the epoch before, or null for the first of the log
    clock_ms            the one clock reading of the epoch, milliseconds since 1970 UTC
    rows, digest        number of changes, and a sum over them in any order; both recognize a replay
    replaces            states whose full content this epoch has (complete mode, or a dropped state)
    description         version of the description that has its states (see `terms`)
    origin              number of the generation's first epoch; above 0 if the log began later than the query
    offsets             end offsets of the query's sources, as in its checkpoint; [] if unknown
    log_bytes           bytes of changes of all epochs up to this one; older versions do not write it
    skipped_rows        rows of all epochs up to this one that were left out, because they cannot be written; missing: 0
    record_ages         the number of records by their age (see `record_ages`); missing: unknown
    feed_ms, feed_...   the epoch's place in the change feed (see `feed_mark`); older versions do not write them
    files               list of {name, size, checksum, rows, runs}: change files, in the order to apply
    inline              list of base64 Arrow IPC streams: changes too few for a file
    slots               only in a part of a snapshot (see `snapshots`): the slots of the part
    state_bytes         only in a snapshot: the bytes of each state (see `state_bytes`); older versions do not write it
    checksum            see `checked_json`

`runs` lists [first slot, last slot, rows] for each record batch of a file, so that the reader of a slot range can skip
the others. Changes are applied in this order: files, then inline. Two changes of one key are in different files or
streams only if their order does not matter (`duplicates="any"`).
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from state_backend.log.checked_json import checked_object, with_checksum
from state_backend.log.feed_mark import FeedMark, is_listed
from state_backend.log.record_ages import RecordAges, ages_in, ages_json
from state_backend.model.errors import LogCorruptError
from state_backend.model.formats import WRITER, check_format
from state_backend.model.records import positions_in
from state_backend.model.slot_set import ALL, SlotSet
from state_backend.model.slots import HASH_BITS, slot_at

if TYPE_CHECKING:
    import pyarrow as pa

# The second format may have FOLDs (see `records.Op`), the third also changes of sets, the fourth also FOLDs with an
# order (see `keep_by_order`). Epochs of jobs without these have a lower format, so that older readers can read them.
FORMAT = 1
FORMAT_WITH_FOLDS = 2
FORMAT_WITH_SETS = 3
FORMAT_WITH_ORDERS = NEWEST_FORMAT = 4


class EpochRef(NamedTuple):
    """Identifies an epoch: its number, and the term of its writer."""

    epoch: int
    term: int


@dataclass(frozen=True)
class ChangeFile:
    """A change file as an epoch lists it. `size` in bytes, `checksum` CRC32 of the file."""

    name: str
    size: int
    checksum: int
    rows: int
    runs: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> ChangeFile:
        """Read one entry of `files`."""
        runs = tuple((first, last, rows) for first, last, rows in stored["runs"])
        return cls(stored["name"], stored["size"], stored["checksum"], stored["rows"], runs)

    def has_slots(self, slots: SlotSet | None) -> bool:
        """Return whether the file may have changes of some slots; None stands for all slots."""
        return slots is None or any(slots.intersects(first, last) for first, last, _ in self.runs)


def slots_of_run(run: pa.RecordBatch) -> tuple[int, int, int]:
    """Return the first slot, the last slot and the number of rows of a sorted run."""
    positions = run.column("position")
    return slot_at(positions[0].as_py()), slot_at(positions[-1].as_py()), run.num_rows


def rows_of_slots(run: pa.RecordBatch, slots: SlotSet) -> pa.RecordBatch:
    """Return the rows of a run whose keys are in some slots, in their order; the run itself if all rows are."""
    import numpy as np
    import pyarrow as pa

    edges = [slot << HASH_BITS for first, last in slots.ranges for slot in (first, last + 1)]
    positions = positions_in(run)
    # A position is in a range if the number of edges at or before it is odd.
    is_inside = np.array(edges, np.uint64).searchsorted(positions, side="right") & 1 == 1
    return run if is_inside.all() else run.filter(pa.array(is_inside))


@dataclass(frozen=True)
class EpochContent:
    """The content of an epoch as `LogWriter.commit` takes it.

    Args:
        replaces: The states whose full content this is.
        skipped_rows: The rows that were left out, because they cannot be written.
        record_ages: The ages of the records (see `record_ages`); empty: unknown.
    """

    files: Sequence[ChangeFile] = ()
    inline: Sequence[bytes] = ()
    rows: int = 0
    digest: int = 0
    replaces: tuple[str, ...] = ()
    skipped_rows: int = 0
    record_ages: RecordAges = field(default_factory=dict)

    def with_inline(self, changes: bytes | None) -> EpochContent:
        """Add inline changes that are not part of the digest that recognizes a replay; None: there are none."""
        return self if changes is None else replace(self, inline=[*self.inline, changes])


# An epoch without changes, which is committed so that the numbers have no hole.
NO_CHANGES = EpochContent()


@dataclass(frozen=True)
class Epoch:
    """The content of an epoch's file."""

    epoch: int
    term: int
    previous: EpochRef | None
    clock_ms: int
    rows: int = 0
    digest: int = 0
    replaces: tuple[str, ...] = ()
    description: int = 1
    origin: int = 0
    files: tuple[ChangeFile, ...] = ()
    inline: tuple[bytes, ...] = ()
    format: int = FORMAT
    log_bytes: int = 0
    skipped_rows: int = 0
    slots: SlotSet = ALL
    offsets: tuple[str, ...] = ()
    state_bytes: Mapping[str, int] | None = None
    record_ages: RecordAges = field(default_factory=dict)
    feed: FeedMark | None = None

    @property
    def ref(self) -> EpochRef:
        """This epoch's number and term."""
        return EpochRef(self.epoch, self.term)

    @property
    def change_bytes(self) -> int:
        """The size of the changes that the epoch lists."""
        return sum(file.size for file in self.files) + sum(map(len, self.inline))

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        content: dict[str, Any] = {
            "format": self.format,
            **WRITER,
            "epoch": self.epoch,
            "term": self.term,
            "previous": self.previous,
            "clock_ms": self.clock_ms,
            "rows": self.rows,
            "digest": self.digest,
            "replaces": list(self.replaces),
            "description": self.description,
            "origin": self.origin,
            "offsets": list(self.offsets),
            "log_bytes": self.log_bytes,
            "files": [vars(file) for file in self.files],
            "inline": [b64encode(stream).decode() for stream in self.inline],
        }
        if self.skipped_rows:
            content["skipped_rows"] = self.skipped_rows
        if self.record_ages:
            content["record_ages"] = ages_json(self.record_ages)
        if self.feed is not None:
            content |= self.feed.to_json()
        if self.slots != ALL:
            content["slots"] = str(self.slots)
        if self.state_bytes is not None:
            content["state_bytes"] = dict(self.state_bytes)
        return with_checksum(content)

    @classmethod
    def from_bytes(cls, stored: bytes, path: str, number: int | None = None) -> Epoch:
        """Read a file's content; LogCorruptError, with `path`, if the content is damaged; NewerFormatError."""
        try:
            content = checked_object(stored, needs_checksum=True)
        except ValueError as damage:
            raise LogCorruptError(f"{path} {damage}; restore it from a copy of the log") from None
        check_format(content, NEWEST_FORMAT, path)
        if number not in (None, content["epoch"]):
            raise LogCorruptError(f"{path} is the file of epoch {content['epoch']}; restore it from a copy of the log")
        previous = content["previous"]
        return cls(
            epoch=content["epoch"],
            term=content["term"],
            previous=None if previous is None else EpochRef(*previous),
            clock_ms=content["clock_ms"],
            rows=content["rows"],
            digest=content["digest"],
            replaces=tuple(content["replaces"]),
            description=content["description"],
            origin=content["origin"],
            files=tuple(map(ChangeFile.from_json, content["files"])),
            inline=tuple(map(b64decode, content["inline"])),
            format=content["format"],
            log_bytes=content.get("log_bytes", 0),
            skipped_rows=content.get("skipped_rows", 0),
            offsets=tuple(content["offsets"]),
            slots=SlotSet.parse(content["slots"]) if "slots" in content else ALL,
            state_bytes=content.get("state_bytes"),
            record_ages=ages_in(content.get("record_ages", {})),
            feed=FeedMark.from_json(content),
        )


def runs_in(stream: bytes | pa.Buffer) -> Iterator[pa.RecordBatch]:
    """Read the runs of an Arrow IPC stream."""
    import pyarrow as pa

    with pa.ipc.open_stream(stream) as reader:
        yield from reader


def entries_of(epoch: Epoch, reset: str | None) -> int:
    """Return the number of an epoch's entries in the change feed (see `history.feed`): of its head, and of changes.

    Only an inline stream may have changes that are not listed.
    """
    head = sum(map(is_listed, epoch.replaces)) + (reset is not None)
    inline = sum(_listed_rows(run) for stream in epoch.inline for run in runs_in(stream))
    return head + sum(file.rows for file in epoch.files) + inline


def _listed_rows(run: pa.RecordBatch) -> int:
    states = run.column("state")
    is_one = list(map(is_listed, states.dictionary.to_pylist()))
    return run.num_rows if all(is_one) else sum(map(is_one.__getitem__, states.indices.to_pylist()))


def to_stream(runs: list[pa.RecordBatch]) -> bytes:
    """Write runs as one Arrow IPC stream."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, runs[0].schema) as writer:
        for run in runs:
            writer.write_batch(run)
    return bytes(sink.getvalue())
