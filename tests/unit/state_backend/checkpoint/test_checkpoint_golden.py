"""Checkpoints of several versions of Spark: whole states and changes are those that Spark's own reader shows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from state_backend.checkpoint.checkpoint import BatchStores, Checkpoint
from state_backend.checkpoint.records import RecordType
from state_backend.checkpoint.states import State, StateForm
from tests.golden_checkpoints import NEWEST, expected, jobs, last_batch, of_spark, plain, unpack

# By Spark's change types: the operations that make them.
CHANGE_TYPES = {"update": RecordType.PUT, "append": RecordType.MERGE, "delete": RecordType.DELETE}
Row = tuple[Any, Any]
# Jobs with batches whose changes Spark's reader cannot show.
WITHOUT_CHANGE_LOGS = ("rocksdb-no-changelog", "transform-no-changelog", "rocksdb-switched")
# Of a query that has stopped writing change logs: the first batch without one, which has no snapshot to compare with.
NOT_COMPARED = [("rocksdb-switched", 2)]
# Versions of Spark whose files are as those before or after them; `test_files_reader.py` has four jobs of each.
VERSIONS_BETWEEN = ("4.0.5", "4.1.4", "4.2.1")
each_job = pytest.mark.parametrize(
    ("version", "job"),
    [pytest.param(*each, marks=[pytest.mark.slow] if each[0] in VERSIONS_BETWEEN else []) for each in jobs()],
)
# The rows of a state in a partition, as of a batch.
Whole = dict[tuple[int, str], list[pa.RecordBatch]]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Checkpoint, dict[int, Whole]]]:
    """Return a checkpoint, and its whole state as of each batch; each is read once: RocksDB needs a process for it."""

    @cache
    def read_once(version: str, job: str) -> tuple[Checkpoint, dict[int, Whole]]:
        checkpoint = Checkpoint.at(str(unpack(version, job, tmp_path_factory.mktemp("checkpoint"))))
        return checkpoint, {batch: whole(checkpoint, batch) for batch in checkpoint.batches()}

    return read_once


Read = Callable[[str, str], tuple[Checkpoint, dict[int, Whole]]]


@each_job
def test_checkpoint_has_rows_that_spark_shows(version: str, job: str, read: Read) -> None:
    checkpoint, wholes = read(version, job)
    assert checkpoint.batches() == [0, 1, 2, 3, 4]
    rows, last = expected(version, job), last_batch(version, job)
    batch_stores = checkpoint.batch_stores(last)
    states = {name_of(state, batch_stores): state for state in batch_stores.states}
    assert set(states) == set(rows["changes"])
    is_changed_as_shown = job != "join4" and job not in WITHOUT_CHANGE_LOGS
    changed = changes(checkpoint, last) if is_changed_as_shown else {}
    for name, state in states.items():
        for batch, given in as_of(rows["states"][name], last):
            found = [
                row
                for (_, name_there), batches in wholes[batch].items()
                for rows_there in batches
                for _, row in rows_of(state, rows_there)
                if name_there == state.name
            ]
            if job == "join4":  # its keys have the time of the event, and no index
                found = [(key[:-1], value) for key, value in found]
                shown = without_index(given, state)
            else:
                shown = [row_of(dict(row), state) for row in given]
            assert ordered(found) == ordered(shown), (name, batch)
        if is_changed_as_shown:
            given = [row for row in rows["changes"][name] if dict(row)["batch_id"] <= last]
            assert changed.get(state.name, {}) == changes_of(given, state), name


@each_job
def test_changes_of_batch_lead_to_next_whole_state(version: str, job: str, read: Read) -> None:
    checkpoint, wholes = read(version, job)
    values: dict[tuple[int, str, str], Any] = {}
    for batch in checkpoint.batches():
        batch_stores = checkpoint.batch_stores(batch)
        for store in batch_stores.stores:
            is_compared = store.has_change_log(batch) or store.can_be_compared(batch)
            assert is_compared == ((job, batch) not in NOT_COMPARED)
            for partition in store.partitions if is_compared else ():
                for state, rows in store.changes([partition], batch):
                    for op, key, value in zip(*map(plain, rows.columns), strict=True):
                        place = (partition, state.name, repr(key))
                        if op == RecordType.DELETE:
                            values.pop(place, None)
                        else:
                            values[place] = values.get(place, []) + value if op == RecordType.MERGE else value
        found = {
            (partition, name, repr(key)): value
            for (partition, name), batches in wholes[batch].items()
            for rows in batches
            for _, key, value in zip(*map(plain, rows.columns), strict=True)
        }
        if (job, batch) in NOT_COMPARED:
            values = found
        assert found == values


@pytest.mark.parametrize(
    "job", [job for version, job in jobs() if version == NEWEST and job.startswith(("hdfs-", "rocksdb-"))]
)
def test_operator_without_metadata_is_known_by_its_schemas(job: str, tmp_path: Path) -> None:
    folder = unpack(NEWEST, job, tmp_path)
    checkpoint = Checkpoint.at(str(folder))
    [operator] = checkpoint.batch_stores(4).operators
    states = whole(checkpoint, 4)
    (folder / "state/0/_metadata/metadata").unlink()  # Spark 3.5 writes none
    [found_operator] = checkpoint.batch_stores(4).operators
    assert SAME_STATES.get(found_operator.name, found_operator.name) == SAME_STATES.get(operator.name, operator.name)
    assert states and whole(checkpoint, 4) == states


# Operators of one state, which their schemas do not tell from each other.
SAME_STATES = {"applyInPandasWithState": "flatMapGroupsWithState"}


def as_of(states: dict[str, Any], last: int) -> Iterator[tuple[int, Any]]:
    """Yield the batches up to the last one, with their rows."""
    return ((int(batch), given) for batch, given in states.items() if int(batch) <= last)


def without_index(given: list[Any], state: State) -> list[Row]:
    rows = [dict(row) for row in given]
    keys = [tuple(value for name, value in row["key"] if name != "index") for row in rows]
    return [(key, of_spark(row["value"], state.value)) for key, row in zip(keys, rows, strict=True)]


def name_of(state: State, batch_stores: BatchStores) -> str:
    return state.name if state.form in (StateForm.JOIN, *VARIABLES) else "default"


VARIABLES = (StateForm.VALUE, StateForm.LIST, StateForm.MAP)


def whole(checkpoint: Checkpoint, batch: int) -> Whole:
    """Read the whole state as of a batch."""
    found: Whole = defaultdict(list)
    for store in checkpoint.batch_stores(batch).stores:
        for partition in store.partitions:
            for state, rows in store.whole([partition], batch):
                found[partition, state.name].append(rows)
    return found


def changes(checkpoint: Checkpoint, newest: int) -> dict[str, dict[tuple[int, str], list[tuple[RecordType, Any]]]]:
    """Return the changes of each key of each state in each batch, in their order."""
    found: dict[str, Any] = defaultdict(lambda: defaultdict(list))
    for batch in range(newest + 1):
        for store in checkpoint.batch_stores(batch).stores:
            for state, rows in store.changes(store.partitions, batch):
                for op, (key, value) in rows_of(state, rows):
                    found[state.name][batch, repr(key)].append((op, value))
    return found


def rows_of(state: State, rows: pa.RecordBatch) -> Iterator[tuple[RecordType, Row]]:
    for op, key, value in zip(*map(plain, rows.columns), strict=True):
        for index, each in enumerate(value if state.is_list and value is not None else [value]):
            # Spark shows the elements after the first one of a new list as appended.
            yield RecordType.MERGE if index else RecordType(op), (key, each)


def row_of(given: dict[str, Any], state: State) -> Row:
    """Return key and value of a row of Spark's reader."""
    key = of_spark(given["key"], key_type(state))
    if state.form is StateForm.MAP:
        key = (key, of_spark(given["user_map_key"], state.key.field(1).type))
        value = given["user_map_value"]
    else:
        value = given["list_element"] if state.form is StateForm.LIST else given["value"]
    return key, of_spark(value, state.value)


def key_type(state: State) -> pa.DataType:
    return state.key.field(0).type if state.form is StateForm.MAP else state.key


def changes_of(given: list[Any], state: State) -> dict[tuple[int, str], list[tuple[RecordType, Any]]]:
    found = defaultdict(list)
    for pairs in given:
        row = dict(pairs)
        key, value = row_of(row, state)
        found[row["batch_id"], repr(key)].append((CHANGE_TYPES[row["change_type"]], value))
    return dict(found)


def ordered(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=repr)
