"""The rows of a query as change records of its job's states, by the names of the columns.

frame     rows, one after another
row       size u32, little endian | an UnsafeRow of Spark (see `checkpoint.unsafe_rows`)
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from state_backend.attach.columns import Column, columns_of_rows
from state_backend.attach.state_encoder import plan_of, text_of
from state_backend.attach.states import key_columns_of
from state_backend.checkpoint.spark_types import parse_struct, type_name
from state_backend.checkpoint.unsafe_rows import decode_rows
from state_backend.codec.row_encoding import RowPlan, SkippedRows, changes_of, in_runs, names_of, sorted_run
from state_backend.model.descriptor import Encoding, Kind, StateDescriptor
from state_backend.model.errors import DescriptorError
from state_backend.model.slot_set import ALL, SlotSet
from state_backend.model.slots import HASH_BITS, SLOTS

SIZE = struct.Struct("<I")


class RowEncoder:
    """Makes changes of frames of one query.

    Args:
        schema: Spark's JSON of the schema of the query's rows.

    Raises:
        DescriptorError: A state needs a column that the rows do not have, or has another kind of value than one row.
        SparkisError: The schema cannot be read.
    """

    def __init__(self, job: str, states: Sequence[StateDescriptor], schema: bytes) -> None:
        self._schema = parse_struct(schema, "the schema of the query's rows")
        self._states = [_StateRows(job, state, self._schema) for state in states]
        self._names = names_of([state.plan for state in self._states])

    def changes(self, frame: bytes, slots: SlotSet) -> list[pa.RecordBatch]:
        """Return the changes of a frame as sorted runs, the last row of each key, of keys in some slots.

        CheckpointFormatError for a frame that has no such rows. Rows without a key are left out.
        """
        starts, sizes = _rows_in(frame)
        rows = decode_rows(frame, starts, sizes, self._schema, "a frame of rows")
        runs = []
        for number, state in enumerate(self._states):
            changes = state.changes(rows, number, self._names)
            if slots != ALL:
                changes = changes.filter(pa.array(_is_in(slots)[changes.column("position").to_numpy() >> HASH_BITS]))
            runs += [sorted_run([state.plan], run) for run in in_runs([changes])]
        return runs


class _StateRows:
    """The columns of one state in the rows of a query."""

    def __init__(self, job: str, state: StateDescriptor, schema: pa.StructType) -> None:
        _check_kind(job, state)
        columns = columns_of_rows(schema, key_columns_of(state))
        for name in (*state.format_for(job).columns, *state.value):
            _check_column(job, state, name, columns)
        self._state = state
        self.plan: RowPlan = plan_of(columns.__getitem__, state, job)
        self._key = [columns[name] for name in self.plan.key_names]
        self._value = [columns[name] for name in state.value]

    def changes(self, rows: pa.StructArray, number: int, names: pa.Array) -> pa.RecordBatch:
        is_text = self._state.encoding is Encoding.TEXT
        read = {f"k{index}": text_of(column, rows, rows) for index, column in enumerate(self._key)}
        for index, column in enumerate(self._value):
            read[f"v{index}"] = text_of(column, rows, rows) if is_text else column.read(rows, rows)
        return changes_of(self.plan, number, names, pa.RecordBatch.from_pydict(read), SkippedRows())


def _check_kind(job: str, state: StateDescriptor) -> None:
    named = f"state {state.name!r} of job {job!r}"
    if state.kind not in (Kind.VALUE, Kind.MAP):
        raise DescriptorError(f"{named} is a {state.kind}; values and hashes can be shown before their commit")
    if state.field is not None:
        raise DescriptorError(
            f"{named} has one field of a hash in each row (field={state.field!r}); a hash can be shown before its "
            f"commit if a row has all of it"
        )
    if state.reduce is not None or state.by is not None or state.ttl is not None or state.expire_at is not None:
        raise DescriptorError(
            f"{named} depends on earlier rows or expires, which the rows of a query do not tell; it "
            f"cannot be shown before its commit"
        )


def _check_column(job: str, state: StateDescriptor, name: str, columns: dict[str, Column]) -> None:
    named = f"state {state.name!r} of job {job!r}"
    if name not in columns:
        raise DescriptorError(f"{named} needs the column {name!r}; the query's rows have {', '.join(columns)}")
    kind, expected = type_name(columns[name].kind), state.columns.get(name)
    if expected not in (None, kind):
        raise DescriptorError(
            f"{named}: the column {name!r} is {expected} in the state, and {kind} in the query's rows"
        )


def _rows_in(frame: bytes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return where the rows of a frame begin, and their sizes; a damaged size ends outside of the frame."""
    at, end, unpack = 0, len(frame), SIZE.unpack_from
    found = []
    while at + SIZE.size <= end:
        size = unpack(frame, at)[0]
        found.append(size)
        at += SIZE.size + size
    if at < end:
        found.append(end)  # a rest that is no row: longer than the frame
    sizes = np.array(found, np.int64)
    return np.cumsum(sizes + SIZE.size) - sizes, sizes


def _is_in(slots: SlotSet) -> npt.NDArray[np.bool_]:
    """Return for each slot whether it is one of them."""
    found = np.zeros(SLOTS, bool)
    for first, last in slots.ranges:
        found[first : last + 1] = True
    return found
