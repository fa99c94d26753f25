"""Rows of a checkpoint as change records: the columns that a descriptor names, in the form of `row_encoding`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.attach.columns import AnyColumn, Columns, is_nested, is_scalar, source_of, variable_of
from state_backend.attach.states import DELETED, EXPIRE_AT, ORDER, RESETS, AttachedState, descriptor_of, key_columns_of
from state_backend.checkpoint.records import RecordType
from state_backend.checkpoint.spark_types import type_name
from state_backend.checkpoint.states import State, StateForm, stable_name
from state_backend.codec.column_text import NUMBERS, date_text, is_interval
from state_backend.codec.json_text import JsonForm
from state_backend.codec.row_encoding import RowError, RowPlan, SkippedRows, changes_of
from state_backend.model.descriptor import Encoding, JsonDecimals, Kind, StateDescriptor
from state_backend.model.errors import DescriptorError

# The types of the columns that have no counterpart in Spark's rows.
OWN_TYPES = {DELETED: "boolean", EXPIRE_AT: "bigint", RESETS: "boolean", ORDER: "bigint"}


# The version of the JSON in keys. A log with another one is written anew: its keys would stay for ever.
JSON_IN_KEYS = 2


@dataclass(frozen=True)
class StateEncoder:
    """One state of the log, and the operator's state that it is read from."""

    columns: Columns
    descriptor: StateDescriptor
    plan: RowPlan

    @classmethod
    def of(cls, columns: Columns, requested: AttachedState, job: str) -> Self:
        """Fill in the defaults of the operator's state, and validate the state against its columns."""
        subject = source_of(columns.state)
        columns = columns.with_computed(requested.columns or {})
        descriptor = descriptor_of(columns.names, requested)
        _check_key_expressions(columns, descriptor)
        for name in descriptor.value:
            _check_value(columns.column(name), descriptor, subject)
        typed = replace(descriptor, columns=_types(columns, descriptor, job))
        plan = plan_of(columns.column, typed, job)
        return cls(columns, typed, replace(plan, skips_bad_rows=requested.on_bad_key == "skip"))

    @property
    def state(self) -> State:
        """The operator's state as of the batch that the attachment began with."""
        return self.columns.state

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The source of the state, as plain JSON, the same as the one of Spark's reader."""
        state = self.state
        return {
            "operator_id": state.operator,
            "operator": stable_name(state.operator_name),
            "variable": variable_of(state),
            "schema": schema_text(state),
            "columns": self.columns.texts(self.descriptor.value),
            **({"json_in_keys": JSON_IN_KEYS} if self._has_json_in_keys else {}),
        }

    @property
    def _has_json_in_keys(self) -> bool:
        return any(self.columns.column(name).is_json for name in key_columns_of(self.descriptor))

    @property
    def hint(self) -> str | None:
        """How to name the functions of the aggregation; None if they are named, or the value has no buffers of them."""
        is_default = self.descriptor.value == self.columns.default_value
        return self.columns.hint if is_default else None

    def encoded(self, rows: pa.RecordBatch, number: int, names: pa.Array, skipped: SkippedRows) -> pa.RecordBatch:
        """Return decoded rows as changes of the state `names[number]`, in order. RowError, or rows are skipped."""
        ops, key, value = rows.column("op"), rows.column("key"), rows.column("value")
        is_deleted = pc.equal(ops, int(RecordType.DELETE))
        owner: npt.NDArray[np.int64] | None = None
        if self.state.is_list:
            key, value, is_deleted, resets, owner = _elements(ops.to_numpy(), key, value)
        read = {
            f"k{index}": text_of(self.columns.column(name), key, value)
            for index, name in enumerate(self.plan.key_names)
        }
        if self.plan.field_name is not None:
            read["f"] = text_of(self.columns.column(self.plan.field_name), key, value)
        for index, column in enumerate(self._values(key, value)):
            read[f"v{index}"] = column
        if self.columns.expire_at is not None:
            read["e"] = self.columns.expire_at.read(key, value)
        read["d"] = is_deleted
        if owner is not None:
            read["r"] = resets
            read = self._without_null_elements(read, owner, skipped)
        return changes_of(self.plan, number, names, pa.RecordBatch.from_pydict(read), skipped)

    def _values(self, key: pa.StructArray, value: pa.StructArray) -> list[pa.Array]:
        descriptor = self.descriptor
        columns = [self.columns.column(name) for name in descriptor.value]
        if descriptor.encoding is Encoding.TEXT:
            return [text_of(column, key, value) for column in columns]
        return [column.read(key, value) for column in columns]

    def _without_null_elements(
        self, read: dict[str, pa.Array], owner: npt.NDArray[np.int64], skipped: SkippedRows
    ) -> dict[str, pa.Array]:
        """Return rows without null elements of lists, because null means "no list"; RowError if they are not skipped.

        Args:
            owner: The list of each row. The next element of the list empties it, if a skipped element would have done
                so.
        """
        is_deleted = read["d"].to_numpy(zero_copy_only=False).copy()
        values = [column for name, column in read.items() if name.startswith("v")]
        is_null = (
            np.logical_and.reduce([value.is_null().to_numpy(zero_copy_only=False) for value in values]) & ~is_deleted
        )
        if not is_null.any():
            return read
        message = (
            f"state {self.descriptor.name!r}: an element of the list is null, and lists of Redis have no nulls; "
            f"replace it: columns={{'element': \"coalesce({self.descriptor.value[0]}, ...)\"}} "
            f"(sparkis attach: --column 'element=coalesce({self.descriptor.value[0]}, ...)')"
        )
        if not self.plan.skips_bad_rows:
            raise RowError(message)
        skipped.add(int(is_null.sum()), message)
        is_reset = read["r"].to_numpy(zero_copy_only=False).copy()
        for row in np.flatnonzero(is_null & is_reset):
            first = row
            while is_null[row] and row + 1 < len(owner) and owner[row + 1] == owner[first]:
                row += 1
            is_reset[first], is_reset[row] = False, not is_null[row]
            is_deleted[row] |= is_null[row]  # all elements are null: there is no list
        kept = pa.array(~is_null | is_deleted)
        changed = {**read, "d": pa.array(is_deleted), "r": pa.array(is_reset)}
        return {name: column.filter(kept) for name, column in changed.items()}


def text_of(column: AnyColumn, key: pa.StructArray, value: pa.StructArray) -> pa.Array:
    """Return a column as `row_encoding` needs it; the forms of the plan do the rest."""
    read = column.read(key, value)
    if pa.types.is_date(read.type):
        return date_text(read)
    return read.cast(pa.string()) if pa.types.is_boolean(read.type) else read


def schema_text(state: State) -> str:
    """Return the schema of a state as Spark's reader shows it."""
    if state.form is StateForm.MAP:
        fields = [("key", state.key.field(0).type), ("user_map_key", state.key.field(1).type)]
        fields.append(("user_map_value", state.value))
    else:
        fields = [("key", state.key), ("list_element" if state.form is StateForm.LIST else "value", state.value)]
    return f"struct<{','.join(f'{name}:{type_name(kind)}' for name, kind in fields)},partition_id:int>"


def _elements(
    ops: Any, keys: pa.StructArray, values: pa.ListArray
) -> tuple[pa.StructArray, pa.StructArray, pa.Array, pa.Array, npt.NDArray[np.int64]]:
    """Return a row for each element of the lists, and one for each deleted list.

    The columns are the keys, the elements, whether a row deletes, whether it is the first element of a new list, and
    the number of its list.
    """
    is_deleted = ops == RecordType.DELETE
    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy().astype(np.int64)
    counts = np.where(is_deleted, 1, lengths)
    owner = np.repeat(np.arange(len(ops)), counts)
    starts = np.cumsum(counts) - counts
    row_is_deleted = is_deleted[owner]
    indices = np.cumsum(~row_is_deleted) - 1
    elements = values.flatten().take(pa.array(indices, pa.int64(), mask=row_is_deleted))
    is_first = np.zeros(len(owner), bool)
    is_first[starts[(ops == RecordType.PUT) & (lengths > 0)]] = True
    return keys.take(pa.array(owner)), elements, pa.array(row_is_deleted), pa.array(is_first), owner


def _check_value(column: AnyColumn, descriptor: StateDescriptor, subject: str) -> None:
    named = f"state {descriptor.name!r}, {subject}: the column {column.name!r} has the type {type_name(column.kind)}"
    is_list = _is_array(column.kind) and descriptor.kind is Kind.LIST
    if is_list and len(descriptor.value) == 1:
        raise DescriptorError(f"{named}, and an element of a list is no array; choose another column with value=")
    if descriptor.encoding is Encoding.BINARY and not pa.types.is_binary(column.kind):
        raise DescriptorError(f"{named}, but encoding='binary' takes binary columns; use encoding='text'")
    if not (is_scalar(column.kind) or is_nested(column.kind)):
        raise DescriptorError(f"{named}, which has no values; leave it out with value=")


def _check_key_expressions(columns: Columns, descriptor: StateDescriptor) -> None:
    """Raise DescriptorError for a part of the key that an expression makes of the value, or that has no text."""
    of_key = columns.names.of_key
    for each in columns.computed:
        if each.name not in key_columns_of(descriptor):
            continue
        named = (
            f"state {descriptor.name!r}, {source_of(columns.state)}: columns= makes {each.name!r}, a part of the key"
        )
        if not each.uses <= set(of_key):
            raise DescriptorError(
                f"{named}, by {each.text!r}; it may use only {', '.join(of_key)}, because rows that delete "
                f"have no value"
            )
        if not is_scalar(each.kind):
            raise DescriptorError(f"{named}, of the type {each.kind}, which has no text form")


def _is_array(kind: pa.DataType) -> bool:
    """Return whether a type is an array."""
    return bool(pa.types.is_list(kind))


def _types(columns: Columns, descriptor: StateDescriptor, job: str) -> dict[str, str]:
    """Return Spark's names of the types of all columns that a descriptor names."""
    read = [*descriptor.format_for(job).columns, *descriptor.value]
    read += [] if descriptor.field is None else [descriptor.field]
    own = [name for name in (descriptor.deletion, descriptor.expire_at, descriptor.resets) if name is not None]
    types = {name: type_name(columns.column(name).kind) for name in read}
    return types | {name: OWN_TYPES[name] for name in (*own, *descriptor.order_by)}


def plan_of(column_of: Callable[[str], AnyColumn], descriptor: StateDescriptor, job: str) -> RowPlan:
    """Return how rows become changes of a state. column_of: returns a column by its name."""
    form = descriptor.format_for(job)
    is_packed = descriptor.kind is Kind.MAP and descriptor.field is None
    return RowPlan(
        state=descriptor.name,
        literals=form.literals,
        key_names=form.columns,
        key_forms=tuple(_form(column_of(name)) for name in form.columns),
        key_is_open=tuple(
            index < len(form.columns) - 1 and _may_contain(column_of(name), form.literals[index + 1])
            for index, name in enumerate(form.columns)
        ),
        field_name=descriptor.field,
        field_form="text" if descriptor.field is None else _form(column_of(descriptor.field)),
        value_names=descriptor.value,
        value_forms=tuple(_value_form(column_of(name), descriptor) for name in descriptor.value),
        map_fields=descriptor.value if is_packed else (),
        expire_at_ms=None,
        keeps_last=True,
        appends=descriptor.kind is Kind.LIST,
        kind=descriptor.kind,
        object_names=descriptor.object_names,
        json_form=JsonForm(has_text_decimals=descriptor.json_decimals is JsonDecimals.TEXT),
    )


def _value_form(column: AnyColumn, descriptor: StateDescriptor) -> str:
    is_nested_value = descriptor.encoding is Encoding.TEXT and is_nested(column.kind) and not column.is_json
    if is_nested_value or descriptor.encoding is Encoding.JSON:
        return "json"
    return _form(column) if descriptor.encoding is Encoding.TEXT else "text"


def _form(column: AnyColumn) -> str:
    """Return how `row_encoding` converts a column; see `RowPlan`."""
    if pa.types.is_timestamp(column.kind):
        return "timestamp" if column.kind.tz else "timestamp_ntz"
    if is_interval(column.kind):
        return "interval"
    return next((form for is_kind, form in NUMBERS if is_kind(column.kind)), "text")


def _may_contain(column: AnyColumn, separator: str) -> bool:
    """Return whether the separator in the text of a key part may be taken for the one that follows the part."""
    if column.is_json:
        return False  # its braces and brackets tell where it ends
    kind = column.kind
    is_fixed = pa.types.is_boolean(kind) or pa.types.is_date(kind) or pa.types.is_timestamp(kind)
    return not is_fixed or any(character in ".0123456789" for character in separator)


def newest_of_each(run: pa.RecordBatch, is_list: Sequence[bool]) -> pa.RecordBatch:
    """Return a run with the last change of each key and field. Lists keep all changes."""
    rows = run.num_rows
    names = run.column("state").indices.to_numpy()
    keys = run.column("key").dictionary_encode()
    fields = run.column("field").dictionary_encode("encode")
    codes = keys.indices.to_numpy().astype(np.int64) * len(fields.dictionary) + fields.indices.to_numpy()
    _, codes = np.unique(codes, return_inverse=True)
    last = np.zeros(rows, np.int64)
    last[codes] = np.arange(rows)
    is_last = last[codes] == np.arange(rows)
    kept = is_last | np.asarray(is_list, bool)[names]
    return run if kept.all() else run.filter(pa.array(kept))
