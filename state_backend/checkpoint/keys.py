"""The keys of a state as people write them, and how an attachment serves the state.

The columns of a key are joined by `:`. A window is its start; any other struct of a start and an end is both. Other
structs, arrays and maps are JSON, as an attachment writes them. A map's own key, the index of a join's row and the time
of a row in a join of format 4 are no part of it: they are the fields of a hash.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import pyarrow as pa
import pyarrow.compute as pc

from state_backend.checkpoint.spark_types import is_time_window
from state_backend.checkpoint.states import State, StateForm
from state_backend.codec.column_text import any_text
from state_backend.codec.json_text import OF_KEYS, json_objects, json_texts, plain_texts

WITHOUT_COLUMNS = "all"  # the key of an aggregate over the whole stream
SEPARATOR = ":"


def key_type(state: State) -> pa.StructType:
    """Return the columns that make a key."""
    if state.form is StateForm.MAP:
        return cast(pa.StructType, state.key.field(0).type)
    columns = list(state.key)
    return pa.struct(columns[:-1] if state.form is StateForm.JOIN else columns)


def key_columns(keys: pa.StructArray, state: State) -> list[pa.Array]:
    """Return the columns that make the keys."""
    if state.form is StateForm.MAP:
        return list(keys.field(0).flatten())
    return list(keys.flatten()[: key_type(state).num_fields])


def fields(keys: pa.StructArray, state: State) -> pa.Array | None:
    """Return the fields of a hash that are in the keys; None if the state has no such fields."""
    if state.form is StateForm.MAP:
        return keys.field(1)
    return keys.flatten()[-1] if state.form is StateForm.JOIN else None


def field_texts(keys: pa.StructArray, state: State) -> pa.Array | None:
    """Return the fields of a hash as texts, those of several columns as JSON; None if the state has no such fields."""
    found = fields(keys, state)
    if found is None or not pa.types.is_struct(found.type):
        return None if found is None else _text(found)
    return _text(found.field(0) if found.type.num_fields == 1 and not is_window(found.type.field(0).type) else found)


def key_texts(keys: pa.StructArray, state: State) -> pa.Array:
    """Return the keys as texts; a null part is `null`."""
    columns = zip(key_type(state), key_columns(keys, state), strict=True)
    parts = [_text(part) for field, column in columns for part in _parts(field, column)]
    if not parts:
        return pa.array([WITHOUT_COLUMNS] * len(keys), pa.string())
    return pc.binary_join_element_wise(*parts, SEPARATOR, null_handling="replace", null_replacement="null")


def exact_keys(keys: pa.StructArray, state: State) -> list[str]:
    """Return the keys as JSON, which differs even where `key_texts` has one text for two keys."""
    found: list[str] = json_objects(key_type(state).names, key_columns(keys, state), len(keys)).to_pylist()
    return found


def _parts(field: pa.Field, column: pa.Array) -> list[pa.Array]:
    """Return a column, or the start of a window, and its end if the start alone does not identify it."""
    if not is_window(field.type):
        return [column]
    return [pc.struct_field(column, [index]) for index in range(2 if has_two_parts(field) else 1)]


def _text(column: pa.Array) -> pa.Array:
    if pa.types.is_nested(column.type):
        return json_texts(column, OF_KEYS)
    return any_text(column) if pa.types.is_binary(column.type) else plain_texts(column)


def is_window(kind: pa.DataType) -> bool:
    """Return whether a type is that of a window: its start and its end."""
    return bool(
        pa.types.is_struct(kind)
        and [field.name for field in kind] == ["start", "end"]
        and all(pa.types.is_timestamp(field.type) for field in kind)
    )


def has_two_parts(field: pa.Field) -> bool:
    """Return whether a column of a key is a start and an end that are both needed to identify it."""
    return is_window(field.type) and not is_time_window(field)


def key_form(state: State) -> str:
    """Return what `key_texts` makes of a state's keys, with placeholders."""
    return _form(key_type(state))


def _form(columns: Iterable[pa.Field]) -> str:
    names = [
        name
        for field in columns
        for name in ([field.name, f"{field.name}_end"] if has_two_parts(field) else [field.name])
    ]
    return SEPARATOR.join([f"<{name}>" for name in names] or [WITHOUT_COLUMNS])


def served_key(state: State, name: str) -> str:
    """Return the Redis keys that an attachment makes of a state, with placeholders."""
    served = state.key if state.is_list else key_type(state)  # in a join of format 4, a row's time is in the key
    return SEPARATOR.join(["JOB", name, _form(served)])


def served_type(state: State) -> str:
    """Return the Redis type that an attachment makes of a state."""
    if state.is_list:
        return "list"
    if state.form in (StateForm.MAP, StateForm.JOIN, StateForm.SESSION):
        return "hash"
    return "hash" if len(list(_value_fields(state))) > 1 else "string"


def _value_fields(state: State) -> Iterator[pa.Field]:
    value = state.value
    if state.has_ttl or state.form is StateForm.GROUP:
        first = value.field(0).type
        value = first if pa.types.is_struct(first) else pa.struct([value.field(0)])
    yield from value
