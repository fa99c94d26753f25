"""The facts about a checkpoint that `sparkis inspect` shows.

Sizes are counted in whole states, so counting reads all of the state, one partition after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import pyarrow as pa

from state_backend.checkpoint.checkpoint import CODEC, BatchStores, Checkpoint
from state_backend.checkpoint.keys import key_form, served_key, served_type
from state_backend.checkpoint.spark_types import type_name
from state_backend.checkpoint.states import State, UnreadableState, stable_name, state_names
from state_backend.checkpoint.stores import StateStore
from state_backend.log.source_offsets import by_source
from state_backend.model.clock import iso_text
from state_backend.model.errors import CheckpointError, PurgedVersionError, UnsupportedStateError

# Spark may remove a batch while it is read. Then a newer batch is read, up to this many batches.
TRIES_MAX = 3
PREFIX = "spark.sql.streaming."
# Settings of how the state is stored, without the prefix, and a part of the stable names of the operators that use
# them.
SETTINGS = {
    "stateStore.compression.codec": "",
    "stateStore.rocksdb.changelogCheckpointing.enabled": "",
    "stateStore.checkpointFormatVersion": "",
    "stateStore.rowChecksum.enabled": "",
    "join.stateFormatVersion": "Join",
    "aggregation.stateFormatVersion": "StoreSave",
    "flatMapGroupsWithState.stateFormatVersion": "WithState",
}
# Called with the number of partitions that have been read, and of all.
Progress = Callable[[int, int], None]
Result = TypeVar("Result")


def with_batch(checkpoint: Checkpoint, batch: int | None, read: Callable[[int], Result]) -> Result:
    """Call `read` with a batch; return its result. None: the newest one, or a newer one if its files are removed."""
    for tries in range(1, TRIES_MAX + 1):
        chosen = checkpoint.newest_batch() if batch is None else batch
        if chosen is None:
            raise CheckpointError(
                f"{checkpoint.location} has no committed micro-batch: the query has not finished its first one"
            )
        try:
            return read(chosen)
        except PurgedVersionError:
            if tries == TRIES_MAX or batch is not None or checkpoint.newest_batch() == chosen:
                raise
    raise AssertionError("the last try returns or raises")


def inspect(checkpoint: Checkpoint, batch: int | None, progress: Progress, *, counts: bool) -> dict[str, Any]:
    """Return the facts as values of JSON.

    Args:
        counts: Also rows and bytes.
    """
    return with_batch(checkpoint, batch, lambda chosen: _inspect(checkpoint, chosen, progress, counts=counts))


def _inspect(checkpoint: Checkpoint, batch: int, progress: Progress, *, counts: bool) -> dict[str, Any]:
    batch_stores = checkpoint.batch_stores(batch)
    batches, offsets = checkpoint.batches(), checkpoint.offsets(batch)
    sizes, uncounted = _sizes(batch_stores, progress) if counts else ({}, [])
    names = names_of(batch_stores)
    return {
        "location": checkpoint.location,
        "query": checkpoint.query_id,
        "spark": _spark_of(batch_stores, offsets.settings),
        "batch": batch,
        "batches": {"first": batches[0], "last": batches[-1]} if batches else {},
        "time": iso_text(offsets.timestamp_ms),
        "watermark": iso_text(offsets.watermark_ms) if offsets.watermark_ms else None,
        "sources": {str(source): end for source, end in by_source(checkpoint.source_offsets(batch)).items()},
        "provider": batch_stores.provider,
        "settings": {
            name: offsets.settings[PREFIX + name]
            for name, part in SETTINGS.items()
            if PREFIX + name in offsets.settings
            and any(part in stable_name(operator.name) for operator in batch_stores.operators)
        },
        "operators": [
            {
                "operator": operator.number,
                "name": operator.name,
                "states": [
                    {
                        "name": names[state],
                        "key": _schema(state.key),
                        "value": _schema(state.value),
                        "ttl": state.has_ttl,
                        "served_as": served_key(state, names[state]),
                        "type": served_type(state),
                        **({"partitions": sizes[state]} if state in sizes else {}),
                    }
                    for state in batch_stores.states
                    if state.operator == operator.number
                ],
                "unread": [
                    {"state": each.variable, "reason": each.reason}
                    for each in (*batch_stores.unread, *uncounted)
                    if each.operator == operator.number
                ],
            }
            for operator in batch_stores.operators
        ],
    }


def _spark_of(batch_stores: BatchStores, settings: Mapping[str, str]) -> str | None:
    """Return the versions of Spark that write such a checkpoint; None without operators: only their files differ."""
    if not batch_stores.operators:
        return None
    if batch_stores.has_metadata:
        return "4.0 or later"
    return "3.1 to 3.5" if CODEC in settings else "3.0 or earlier"


def names_of(batch_stores: BatchStores) -> dict[State, str]:
    """Return the name of each state; with the operator's number where several have one name, as `attach` does."""
    return dict(zip(batch_stores.states, state_names(batch_stores.states), strict=True))


def _sizes(
    batch_stores: BatchStores, progress: Progress
) -> tuple[dict[State, list[dict[str, int]]], list[UnreadableState]]:
    """Return the rows and decoded bytes of each state in each partition, and the states whose rows cannot be read."""
    found: dict[State, list[dict[str, int]]] = {state: [] for state in batch_stores.states}
    unread: list[UnreadableState] = []
    for store, partition in partitions_of(batch_stores, progress):
        if not all(state in found for state in store.states):
            continue
        rows, size = dict.fromkeys(store.states, 0), dict.fromkeys(store.states, 0)
        try:
            for state, batch in store.whole([partition], batch_stores.batch):
                rows[state] += batch.num_rows
                size[state] += batch.nbytes
        except UnsupportedStateError as error:
            for state in store.states:
                del found[state]
                unread.append(UnreadableState(state.operator, state.operator_name, state.name, str(error)))
            continue
        for state in store.states:
            found[state].append({"partition": partition, "rows": rows[state], "bytes": size[state]})
    return found, unread


def partitions_of(batch_stores: BatchStores, progress: Progress) -> Iterator[tuple[StateStore, int]]:
    """Iterate over the partitions of all stores, and show the progress."""
    partitions = [(store, partition) for store in batch_stores.stores for partition in store.partitions]
    for done, partition in enumerate(partitions):
        progress(done, len(partitions))
        yield partition
    progress(len(partitions), len(partitions))


def key_forms(checkpoint: Checkpoint, batch: int) -> tuple[dict[str, str], str]:
    """Return how the keys of each state look, by the state's name, and the end of an error: what is not read."""
    batch_stores = checkpoint.batch_stores(batch)
    return {name: key_form(state) for state, name in names_of(batch_stores).items()}, not_read(batch_stores)


def not_read(batch_stores: BatchStores) -> str:
    """Return the end of an error: what may have the key, and is not read."""
    return "".join(f"; not read: {each}" for each in batch_stores.unread)


def _schema(kind: pa.StructType) -> list[dict[str, str]]:
    return [{"name": field.name, "type": type_name(field.type)} for field in kind]
