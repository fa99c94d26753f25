"""`sparkis.read_table`: a state as a table of Arrow, for pandas, Polars and DuckDB."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import pyarrow as pa

from state_backend.apply.temporary_store import past_snapshot
from state_backend.codec.column_text import any_text, readable_text, times_of
from state_backend.log.change_log import ChangeLog
from state_backend.log.filesystems import Filesystem
from state_backend.log.time_travel import AsOf, moment_of
from state_backend.model.descriptor import Encoding, KeyFormat, Kind, Reduce, StateDescriptor
from state_backend.model.errors import LogError
from state_backend.store.store import KeyInfo, Snapshot

# The keys of one step of the scan, and the rows of one record batch (guesses). A batch also ends at BATCH_BYTES.
SCANNED_KEYS = 1_000
BATCH_ROWS = 65_536
BATCH_BYTES = 64 << 20

TYPES = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
DECIMAL = re.compile(r"decimal\((\d+),(-?\d+)\)")
# Intervals with months are texts: pandas and Polars have no type for them.
DAYS_AND_SECONDS = re.compile(r"interval (day|hour|minute|second)( to (hour|minute|second))?")
INSTANTS = ("timestamp", "timestamp_ntz")
TIMES = ("date", *INSTANTS)
# A time in a key has colons, and a separator is often one.
INSTANT = rb"([^T]*T\d\d:\d\d:\d\d(?:\.\d+)?Z?)"
EXPIRY = pa.timestamp("ms", "UTC")

# Bytes or text for each column of the table; numbers for a position, a score and an expiry.
Row = tuple[Any, ...]


def read_table(
    log: str | Path | Filesystem,
    job: str | None,
    state: str,
    *,
    as_of: int | str | datetime | None = None,
    raw: bool = False,
) -> pa.Table:
    """Return a state as a table of Arrow, read from a job's log.

    No server and no Spark are needed. The state is built on this machine's disk; memory grows with the table only.
    `prices.to_pandas()`, `polars.from_arrow(prices)` and `duckdb.sql("from prices")` take a table `prices` from there.

    There is a row for each key and, by the state's kind, for each field, element or member of it:

    | kind | columns after the key's |
    |---|---|
    | value | the value columns |
    | map of several value columns | the value columns |
    | map with `field=` | `field`, the value columns |
    | list | `position`, from 0, and the value columns |
    | set | `member` |
    | sorted set | `member`, `score` |

    - The columns of the key come first. If the key has several columns, or none, the whole key precedes them as `key`.
      A text in the key may contain the separator; if the key can be split in several ways, its columns are null. Times
      are told from what follows them.
    - A state whose value columns have no names has the column `value`.
    - The last column is `expire_at`.
    - A name already in use is prefixed with `_`.

    Columns have the types that Spark gave them: numbers, booleans, decimals, binary, dates, timestamps in UTC, and
    intervals of days and seconds. Structs, arrays, variants, intervals of years and months, times of a day, times with
    a `time_format` and columns without a known type are text. Bytes of a text that are not UTF-8 are U+FFFD, because
    Arrow's strings cannot hold them; `raw=True` has the bytes.

    Args:
        log: The root of the change log.
        job: The job's name. None: the only job with such a state.
        state: The name of the state.
        as_of: A past moment at which the log can still be read: an epoch's number, a datetime (UTC if it has no zone),
            or a text in ISO 8601. A time selects the newest epoch committed by then. Keys that had expired by the
            moment are left out. Default: now.
        raw: All columns as bytes, as clients see them, except `position`, `score` and `expire_at`.

    Raises:
        LogError: The log has no such state or cannot be read at this moment, or a value is not of its column's type.

    Examples:
        >>> states = [sparkis.StateDescriptor("price", key="ticker", value="price", columns={"price": "double"})]
        >>> with sparkis.LogWriter(path, "market", states) as writer:
        ...     for price in (b"12.5", b"12.75"):
        ...         epoch = writer.publish([sparkis.Change("price", sparkis.Op.PUT, b"market:price:ACME", value=price)])
        >>> sparkis.read_table(path, "market", "price").to_pylist()
        [{'ticker': 'ACME', 'price': 12.75, 'expire_at': None}]
        >>> sparkis.read_table(path, "market", "price", as_of=0).column("price").to_pylist()
        [12.5]
    """
    change_log = ChangeLog(log)
    try:
        point = None if as_of is None else AsOf.of(as_of)
    except ValueError as error:
        raise LogError(f"as_of={error}") from None
    job, descriptor = find_state(change_log, state, job)
    moment = moment_of(change_log.job(job), point)
    rows = _Rows(job, descriptor, raw)
    with past_snapshot(change_log, job, moment) as snapshot:
        return pa.Table.from_batches(rows.batches(snapshot), rows.schema)


def find_state(log: ChangeLog, state: str, job: str | None) -> tuple[str, StateDescriptor]:
    """Return a state, and the name of its job; LogError if there is none, or if several jobs have one."""
    names = log.jobs()
    if job is not None and job not in names:
        raise _swapped(log, job) or log.no_such_job(job)
    found: list[tuple[str, StateDescriptor]] = []
    others: list[tuple[str, StateDescriptor]] = []
    for name in names if job is None else [job]:
        current = log.job(name).visible()
        for each in () if current is None else log.job(name).description(current.generation).states:
            (found if each.name == state else others).append((name, each))
    if len(found) == 1:
        return found[0]
    if found:
        raise LogError(f"the jobs {', '.join(name for name, _ in found)} have a state {state!r}; name one of them")
    there = ", ".join(f"{each.name} of job {name}" for name, each in others) or "none"
    raise LogError(f"the log {log.filesystem.root} has no state {state!r}; states: {there}")


def _swapped(log: ChangeLog, job: str) -> LogError | None:
    """Return the error for a state's name in place of the job's; None if no state has this name."""
    for name in log.jobs():
        current = log.job(name).visible()
        states = () if current is None else log.job(name).description(current.generation).states
        if any(state.name == job for state in states):
            return LogError(
                f"the log {log.filesystem.root} has no job {job!r}, which is a state of job {name!r}: the job precedes "
                f"the state, read_table(log, job, state)"
            )
    return None


class _Rows:
    """The rows of one state, and the schema that they have."""

    def __init__(self, job: str, state: StateDescriptor, raw: bool) -> None:
        self._state, self._raw = state, raw
        form = state.format_for(job)
        # If the shortest and the longest match agree, the key splits in one way only.
        self._shortest, self._longest = (self._split(form, text) for text in (b"(.*?)", b"(.*)"))
        self._has_key = len(form.columns) != 1
        self._is_pivot = state.kind is Kind.MAP and state.field is None and bool(state.value)
        self._value_names = () if state.kind in (Kind.SET, Kind.SORTED_SET) else state.value or ("value",)
        named = {*form.columns, *state.value}
        fields: list[pa.Field] = []

        def add(name: str, kind: pa.DataType, *, own: bool = True) -> None:
            while (own and name in named) or any(name == field.name for field in fields):
                name = f"_{name}"
            fields.append(pa.field(name, kind))

        if self._has_key:
            add("key", self._type(""))
        for name in form.columns:
            add(name, self._type(name), own=False)
        if state.kind is Kind.LIST:
            add("position", pa.int64())
        elif state.kind in (Kind.SET, Kind.SORTED_SET):
            add("member", self._type(state.member or ""))
        elif state.kind is Kind.MAP and not self._is_pivot:
            add("field", self._type(state.field or ""))
        if state.kind is Kind.SORTED_SET:
            add("score", pa.float64())
        for name in self._value_names:
            add(name, self._value_type(name), own=name not in named)
        add("expire_at", EXPIRY)
        self.schema = pa.schema(fields)

    def _split(self, form: KeyFormat, text: bytes) -> re.Pattern[bytes]:
        """Return the pattern of the keys, with a group for each column.

        Args:
            text: The text of columns with any text.
        """
        is_iso = self._state.time_format is None and len(form.columns) > 1
        kinds = (self._state.columns.get(name) for name in form.columns)
        groups = [INSTANT if is_iso and kind in INSTANTS else text for kind in kinds]
        literals = [re.escape(literal.encode()) for literal in form.literals]
        return re.compile(b"".join(chain(*zip_longest(literals, groups, fillvalue=b""))) + rb"\Z", re.DOTALL)

    def _type(self, column: str) -> pa.DataType:
        kind = self._state.columns.get(column, "string")
        if self._raw:
            return pa.binary()
        if self._state.time_format is not None and kind in TIMES:
            return pa.string()
        if decimal := DECIMAL.fullmatch(kind):
            return pa.decimal128(int(decimal[1]), int(decimal[2]))
        if DAYS_AND_SECONDS.fullmatch(kind):
            return pa.duration("us")
        return TYPES.get(kind, pa.string())

    def _value_type(self, column: str) -> pa.DataType:
        """Return the type of a value: sums and counts are larger than their column."""
        kind = self._type(column)
        if self._raw or self._state.reduce not in (Reduce.SUM, Reduce.COUNT):
            return kind
        if self._state.reduce is Reduce.COUNT or pa.types.is_integer(kind):
            return pa.int64()
        return pa.decimal128(38, kind.scale) if pa.types.is_decimal(kind) else pa.float64()

    def batches(self, snapshot: Snapshot) -> Iterator[pa.RecordBatch]:
        """Yield the rows of all keys of the state as record batches, in slot order."""
        rows: list[Row] = []
        size = 0
        for info in keys_of_state(snapshot, self._state):
            key = self._key(info.key)
            for row in self._rows(snapshot, info):
                rows.append((*key, *row))
                size += sum(len(each) for each in row if isinstance(each, (bytes, str)))
                if len(rows) >= BATCH_ROWS or size >= BATCH_BYTES:
                    yield self._batch(rows)
                    rows, size = [], 0
        if rows:
            yield self._batch(rows)

    def _key(self, key: bytes) -> Row:
        shortest, longest = self._shortest.match(key), self._longest.match(key)
        parts: Row = (None,) * self._shortest.groups
        if shortest is not None and longest is not None and shortest.groups() == longest.groups():
            parts = shortest.groups()
        return (key, *parts) if self._has_key else parts

    def _rows(self, snapshot: Snapshot, info: KeyInfo) -> Iterator[Row]:
        key, expire_at_ms = info.key, info.expire_at_ms
        match info.kind:
            case Kind.MAP if self._is_pivot:
                names = [name.encode() for name in self._value_names]
                yield *snapshot.fields(key, names), expire_at_ms
            case Kind.MAP:
                for some in _batched(snapshot.map_pairs(key), SCANNED_KEYS):
                    expiries = snapshot.field_expiries(key, [name for name, _ in some])
                    for (name, value), expiry in zip(some, expiries, strict=True):
                        yield name, *self._values(value), expiry or expire_at_ms
            case Kind.LIST:
                for position, element in enumerate(snapshot.list_elements(key, 0, snapshot.list_size(key))):
                    yield position, *self._values(element), expire_at_ms
            case Kind.SET:
                for member in snapshot.members(key):
                    yield member, expire_at_ms
            case Kind.SORTED_SET:
                for member, score in snapshot.sorted_members(key, 0, snapshot.sorted_size(key)):
                    yield member, score, expire_at_ms
            case Kind.VALUE:
                yield *self._values(snapshot.value(key) or b""), expire_at_ms

    def _values(self, stored: bytes) -> Row:
        """Return the texts of the value columns."""
        if self._raw or self._state.encoding is not Encoding.JSON:
            return (stored,) * len(self._value_names)
        try:
            loaded = json.loads(stored, parse_int=str, parse_float=str)
        except ValueError:
            raise LogError(f"state {self._state.name!r}: {stored[:100]!r} is not JSON; read it with raw=True") from None
        if len(self._value_names) == 1:
            return (self._part(self._value_names[0], loaded),)
        return tuple(
            self._part(name, loaded.get(name, loaded.get(name.rpartition(".")[2]))) for name in self._value_names
        )

    def _part(self, name: str, loaded: Any) -> str | bytes | None:
        """Return a part of a JSON document as the text of its column; bytes are in base64 there."""
        text = _text(loaded)
        return text if text is None or self._state.columns.get(name) != "binary" else base64.b64decode(text)

    def _batch(self, rows: Sequence[Row]) -> pa.RecordBatch:
        columns = zip(*rows, strict=True)
        return pa.RecordBatch.from_arrays(
            [self._array(field, column) for field, column in zip(self.schema, columns, strict=True)], schema=self.schema
        )

    def _array(self, field: pa.Field, values: Sequence[Any]) -> pa.Array:
        if isinstance(next((value for value in values if value is not None), 0), (int, float)):
            return pa.array(values, field.type)
        try:
            texts = pa.array(values, pa.binary())
            if pa.types.is_string(field.type):
                return readable_text(any_text(texts))
            if pa.types.is_binary(field.type):
                return texts
            texts = texts.cast(pa.string())
            return times_of(texts, field.type) if pa.types.is_temporal(field.type) else texts.cast(field.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise LogError(
                f"state {self._state.name!r}: column {field.name!r} has a value that is not of type {field.type}; read "
                f"it with raw=True ({error})"
            ) from None


def _text(loaded: Any) -> str | None:
    """Return a part of a JSON document as the text of its column."""
    if loaded is None or isinstance(loaded, str):
        return loaded
    return json.dumps(loaded, ensure_ascii=False, separators=(",", ":"))


def _batched(items: Iterator[Any], count: int) -> Iterator[list[Any]]:
    while some := list(islice(items, count)):
        yield some


def keys_of_state(snapshot: Snapshot, state: StateDescriptor) -> Iterator[KeyInfo]:
    """Iterate over the keys of a state, in slot order."""
    cursor = -1
    while cursor:
        cursor, keys = snapshot.scan(max(cursor, 0), SCANNED_KEYS, (state.kind,))
        for info in map(snapshot.key_info, keys):
            if info is not None and info.state == state.name:
                yield info
