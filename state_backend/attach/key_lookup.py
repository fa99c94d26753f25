"""The look-up of one key in a checkpoint: the JSON of its values, with the columns and texts of an attachment.

A look-up reads the whole state, one partition after the other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.attach.columns import Columns, columns_of
from state_backend.checkpoint.checkpoint import Checkpoint
from state_backend.checkpoint.inspection import Progress, names_of, not_read, partitions_of, with_batch
from state_backend.checkpoint.keys import exact_keys, field_texts, key_texts
from state_backend.checkpoint.states import State
from state_backend.codec.column_text import readable_text
from state_backend.codec.json_text import OF_VALUES, JsonForm, json_objects
from state_backend.model.errors import CheckpointError

# The tokens of JSON without white space: a text, a sign, a number or a word.
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\[\]{},:"]+')


def look_up(
    checkpoint: Checkpoint,
    key: str,
    name: str | None,
    batch: int | None,
    progress: Progress,
    *,
    expressions: Mapping[str, str] | None = None,
    form: JsonForm = OF_VALUES,
) -> tuple[int, dict[str, str]]:
    """Return a batch, and the JSON of a key's value by state; of one state, if its name is given.

    Args:
        expressions: Further columns, as the `columns` of an `AttachedState`.
    """
    lookup = _Lookup(checkpoint, key, name, progress, expressions or {}, form)
    return with_batch(checkpoint, batch, lambda chosen: (chosen, lookup.values(chosen)))


class _Lookup:
    def __init__(
        self,
        checkpoint: Checkpoint,
        key: str,
        name: str | None,
        progress: Progress,
        expressions: Mapping[str, str],
        form: JsonForm,
    ) -> None:
        self._checkpoint, self._key, self._name, self._progress = checkpoint, key, name, progress
        self._expressions, self._form = expressions, form

    def values(self, batch: int) -> dict[str, str]:
        """Return the JSON of the key's value after a batch, by state."""
        batch_stores = self._checkpoint.batch_stores(batch)
        batch_stores.check()
        names = names_of(batch_stores)
        if self._name is not None and self._name not in names.values():
            known = ", ".join(sorted(names.values())) or "none"
            raise CheckpointError(
                f"{self._checkpoint.location} has no state {self._name!r}; its states: {known}{not_read(batch_stores)}"
            )
        chosen = {
            state: columns_of(state, name).with_computed(self._expressions)
            for state, name in names.items()
            if self._name in (None, name)
        }
        found: dict[str, dict[str, str] | str] = {}
        keys: dict[str, set[str]] = {}
        for store, partition in partitions_of(batch_stores, self._progress):
            if not any(state in chosen for state in store.states):
                continue
            for state, rows in store.whole([partition], batch_stores.batch):
                if state in chosen:
                    matching = _matching(rows, self._key, state)
                    keys.setdefault(names[state], set()).update(exact_keys(matching.column("key"), state))
                    self._add(found, chosen[state], matching)
        for state_name, exact in keys.items():
            self._check_is_one(state_name, exact)
        return {name: each if isinstance(each, str) else _object(each) for name, each in found.items()}

    def _check_is_one(self, state: str, keys: set[str]) -> None:
        if len(keys) > 1:
            raise CheckpointError(
                f"the state {state!r} of {self._checkpoint.location} has {len(keys)} keys that are written "
                f"{self._key!r}: {', '.join(sorted(keys)[:3])}; `sparkis attach` can tell them apart by --key-format "
                f"or --column"
            )

    def _add(self, found: dict[str, dict[str, str] | str], columns: Columns, rows: pa.RecordBatch) -> None:
        """Add the values of some rows, which are one value, or fields of a hash."""
        if not rows.num_rows:
            return
        keys, values = rows.column("key"), rows.column("value")
        if columns.state.is_list:
            elements = self._objects(columns, keys, values.flatten())
            found[columns.name] = f"[{','.join(elements)}]"
            return
        objects = self._objects(columns, keys, values)
        names = field_texts(keys, columns.state)
        if names is None:
            found[columns.name] = objects[0]
            return
        entries = found.setdefault(columns.name, {})
        assert isinstance(entries, dict)
        entries.update(zip(readable_text(names).to_pylist(), objects, strict=True))

    def _objects(self, columns: Columns, keys: pa.StructArray, values: pa.StructArray) -> list[str]:
        names = columns.names
        own = tuple(expression for expression in self._expressions if expression not in names.of_key)
        value = names.named_value or own or names.default_value
        # The elements of a list have one key.
        keys = keys if len(keys) == len(values) else keys.take(pa.array(np.zeros(len(values), np.int64)))
        read = [columns.column(name).read(keys, values) for name in value]
        objects: list[str] = json_objects(list(value), read, len(values), self._form).to_pylist()
        return objects


def _matching(rows: pa.RecordBatch, key: str, state: State) -> pa.RecordBatch:
    """Return the rows of a key."""
    written = key.encode(errors="surrogateescape")  # bytes of a command's argument that are not UTF-8
    is_match = pc.equal(key_texts(rows.column("key"), state).cast(pa.binary()), written)
    indices = np.flatnonzero(is_match.to_numpy(zero_copy_only=False))
    return rows.take(pa.array(indices, pa.int64()))


def _object(members: Mapping[str, str]) -> str:
    return f"{{{','.join(f'{json.dumps(name, ensure_ascii=False)}:{text}' for name, text in members.items())}}}"


def indented(values: Mapping[str, str]) -> str:
    """Return the JSON of values by their names in lines, with the texts of numbers as they are."""
    lines, depth, before = [""], 0, ""
    for token in TOKEN.findall(_object(values)):
        if token in ("}", "]"):
            depth -= 1
            if before not in ("{", "["):
                lines.append(" " * depth)
        elif before in ("{", "[", ","):
            lines.append(" " * depth)
        lines[-1] += f"{token} " if token == ":" else token
        depth += token in ("{", "[")
        before = token
    return "\n".join(lines)
