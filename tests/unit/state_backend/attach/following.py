"""Checkpoints that grow commit by commit, and what an attachment has made of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from state_backend.apply.replay import read_snapshot
from state_backend.attach.attachment import Attachment
from state_backend.attach.start import attach_files
from state_backend.attach.states import AttachedState
from state_backend.checkpoint.checkpoint import Checkpoint
from state_backend.checkpoint.states import State, StateForm, state_names
from state_backend.codec.column_text import numpy_float_text
from state_backend.log.change_log import ChangeLog
from state_backend.log.terms import Description
from state_backend.model.descriptor import Kind
from tests import golden_checkpoints as golden

JOB = "j"
WAIT_S = 60.0
NONE = "none"  # the text of a null in a key
Shown = dict[bytes, Any]


class GrowingCheckpoint:
    """A checkpoint whose batches are committed one after the other, as a query would; all state files are there."""

    def __init__(self, version: str, job: str, folder: Path) -> None:
        self._whole = golden.unpack(version, job, folder / "whole")
        self.path = folder / "checkpoint"
        shutil.copytree(self._whole, self.path)
        shutil.rmtree(self.path / "commits")
        (self.path / "commits").mkdir()
        self.batches = sorted(int(path.name) for path in (self._whole / "commits").iterdir())

    def commit(self, batch: int) -> None:
        """Commit a batch: the file appears as a whole."""
        unfinished = self.path / f"commits/.{batch}.tmp"
        shutil.copy(self._whole / f"commits/{batch}", unfinished)
        unfinished.rename(self.path / f"commits/{batch}")

    def uncommit(self, batch: int) -> None:
        """Remove a batch's commit and its plan, as Spark does with old batches, and people who set a query back."""
        (self.path / f"commits/{batch}").unlink()
        (self.path / f"offsets/{batch}").unlink()

    def plan_again(self, batch: int, later_ms: int = 1000, **settings: str) -> None:
        """Write a batch's plan with another time, as Spark does after the query was set back; and other settings."""
        version, header, *sources = (self._whole / f"offsets/{batch}").read_text().split("\n")
        planned = json.loads(header)
        planned["batchTimestampMs"] += later_ms
        planned["conf"] |= settings
        (self.path / f"offsets/{batch}").write_text("\n".join([version, json.dumps(planned), *sources]))

    def rename_query(self, query_id: str) -> None:
        """Give the checkpoint to another query."""
        (self.path / "metadata").write_text(json.dumps({"id": query_id}))


def coalesced(checkpoint: Path) -> list[AttachedState]:
    """Return all states of a checkpoint, with a text instead of nulls in the columns of keys that are texts."""
    found = Checkpoint.at(str(checkpoint)).batch_stores(0).states
    return [
        AttachedState(
            name,
            operator=state.operator,
            variable=state.name if state.form in (StateForm.VALUE, StateForm.MAP, StateForm.LIST) else side_of(state),
            columns={
                field.name: f"coalesce({field.name}, '{NONE}')"
                for field in key_of(state)
                if pa.types.is_string(field.type)
            },
            value=(),
        )
        for state, name in zip(found, state_names(found), strict=True)
    ]


def side_of(state: State) -> str | None:
    return state.name if state.form is StateForm.JOIN else None


def key_of(state: State) -> list[pa.Field]:
    """Return the columns of the key, without those of a map's own key and the index of a join's row."""
    if state.form is StateForm.MAP:
        return list(state.key.field(0).type)
    return list(state.key)[:-1] if state.form is StateForm.JOIN and not state.is_list else list(state.key)


@contextmanager
def following(
    checkpoint: Path, log: Path, states: Sequence[AttachedState] = (), **options: Any
) -> Iterator[Attachment]:
    """Attach to a checkpoint to the end of a block."""
    attachment = attach_files(str(checkpoint), states, job=JOB, log=str(log), **options)
    try:
        yield attachment
    finally:
        attachment.stop()


def epochs(log: Path) -> list[int]:
    """Return the numbers of the epochs of the current generation."""
    found = ChangeLog(str(log)).job(JOB)
    current = found.current()
    return [] if current is None else found.numbers(current.generation)


def generations(log: Path) -> int:
    """Return the number of generations with a writer."""
    found = ChangeLog(str(log)).job(JOB)
    current = found.current()
    assert current is not None
    return len({term.generation for term in found.terms.down_from(current.term) if not term.is_void})


def values_in_log(log: Path) -> Shown:
    """Return the keys and values of the job, as clients read them from its log."""
    with read_snapshot(str(log), JOB) as snapshot:
        kinds = {state.name: state.kind for state in described(log).states}
        found: Shown = {}
        for key, kind in {change.key: kinds[change.state] for change in snapshot.changes()}.items():
            if kind is Kind.MAP:
                found[key] = dict(snapshot.map_pairs(key))
            elif kind is Kind.LIST:
                found[key] = list(snapshot.list_elements(key, 0, snapshot.list_size(key)))
            else:
                found[key] = snapshot.value(key)
        return found


def described(log: Path) -> Description:
    """Return the description of the job in its log."""
    found = ChangeLog(str(log)).job(JOB)
    current = found.current()
    assert current is not None
    return found.description(current.generation)


def in_spark(checkpoint: Path, batch: int) -> Shown:
    """Return what clients should read after a batch, from the rows of the checkpoint, one value after the other.

    A value that is JSON is None.
    """
    batch_stores = Checkpoint.at(str(checkpoint)).batch_stores(batch)
    names = dict(zip(batch_stores.states, state_names(batch_stores.states), strict=True))
    found: Shown = {}
    for store in batch_stores.stores:
        for state, rows in store.whole(store.partitions, batch):
            for key, value in zip(golden.plain(rows["key"]), golden.plain(rows["value"]), strict=True):
                add(found, state, names[state], key, value)
    return found


def add(found: Shown, state: State, name: str, key: tuple[Any, ...], value: Any) -> None:
    parts, field = (key[0], key[1]) if state.form is StateForm.MAP else (key, None)
    if state.form is StateForm.JOIN and not state.is_list:
        parts, field = key[:-1], key[-1:]
    texts = [NONE.encode() if part is None else text(part[0] if isinstance(part, tuple) else part) for part in parts]
    redis_key = b":".join([JOB.encode(), name.encode(), *(texts or [b"all"])])
    if state.is_list:
        found[redis_key] = [of_row(state, element) for element in value]
    elif field is not None:
        found.setdefault(redis_key, {})[text(field[0])] = of_row(state, value)
    else:
        found[redis_key] = of_row(state, value)


def of_row(state: State, row: tuple[Any, ...]) -> Any:
    """Return a row as a string or a hash; None if it is JSON."""
    kind = state.value
    if state.form is StateForm.DEDUPLICATION:
        return b"1" if row[0] is None else text(datetime.fromtimestamp(row[0] / 1e6, UTC))
    if state.has_ttl or state.form is StateForm.GROUP:
        inner = kind.field(0).type
        rest = [] if state.has_ttl else list(zip(list(kind)[1:], row[1:], strict=True))
        pairs = [*(zip(inner, row[0], strict=True) if row[0] is not None else ((f, None) for f in inner)), *rest]
    else:
        pairs = list(zip(kind, row, strict=True))
    names = [field.name for field, _ in pairs]
    used = {field.name for field in state.key}
    read = {
        field.name if names.count(field.name) == 1 and field.name not in used else f"_{index}": value
        for index, (field, value) in enumerate(pairs)
        if not (state.form is StateForm.SESSION and field.name in used)
    }
    if state.form is StateForm.SESSION:
        read["session_window_end"] = read.pop("session_window")[1]
    if len(read) == 1:
        (value,) = read.values()
        return text(value)
    if state.is_list or state.form in (StateForm.MAP, StateForm.JOIN):
        return None
    return {
        name.encode(): None if isinstance(value, (list, tuple, dict)) else text(value)
        for name, value in read.items()
        if value is not None
    }


def without_json(found: Any, like: Any) -> Any:
    """Return what was found, with None where the other has None."""
    if like is None:
        return None
    if isinstance(found, dict) and isinstance(like, dict):
        return {key: without_json(value, like.get(key, b"")) for key, value in found.items()}
    if isinstance(found, list) and isinstance(like, list) and len(found) == len(like):
        return [without_json(value, other) for value, other in zip(found, like, strict=True)]
    return found


def text(value: Any) -> bytes:
    """Return a value as clients read it."""
    if isinstance(value, bool):
        return b"true" if value else b"false"
    if isinstance(value, float):
        return numpy_float_text(np.float64(value)).encode() if value == value else b"NaN"
    if isinstance(value, bytes):
        return value
    if isinstance(value, datetime):
        fraction = f".{value.microsecond:06d}".rstrip("0") if value.microsecond else ""
        return f"{value:%Y-%m-%dT%H:%M:%S}{fraction}{'Z' if value.tzinfo else ''}".encode()
    if isinstance(value, date):
        return value.isoformat().encode()
    if isinstance(value, Decimal):
        return format(value, "f").encode()
    return str(value).encode()
