"""A query's rows as changes of its states: the same texts as an attachment writes, and what does not fit is named."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from typing import Any

import pyarrow as pa
import pytest

from state_backend.fresh.row_encoder import RowEncoder
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import CheckpointFormatError, DescriptorError
from state_backend.model.records import Change, changes_in
from state_backend.model.slot_set import ALL, SlotSet
from state_backend.model.slots import slot_of
from tests.unsafe_rows import unsafe_row

TYPES = {"string": pa.string(), "long": pa.int64(), "double": pa.float64(), "boolean": pa.bool_()}
COLUMNS = {"sensor": "string", "n": "long", "temp": "double", "ok": "boolean"}


def schema_json(columns: dict[str, Any]) -> bytes:
    fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in columns.items()]
    return json.dumps({"type": "struct", "fields": fields}).encode()


def frame(*rows: tuple[Any, ...]) -> bytes:
    kind = pa.struct([(name, TYPES[kind]) for name, kind in COLUMNS.items()])
    encoded = [unsafe_row(row, kind) for row in rows]
    return b"".join(struct.pack("<I", len(each)) + each for each in encoded)


def changes(state: StateDescriptor, *rows: tuple[Any, ...], slots: SlotSet = ALL) -> list[Change]:
    encoder = RowEncoder("job", [state], schema_json(COLUMNS))
    return [change for run in encoder.changes(frame(*rows), slots) for change in changes_in(run)]


MAX = StateDescriptor("max", key="sensor", value="temp", columns={"sensor": "string", "temp": "double"})


def test_last_row_of_each_key_in_frame_is_change() -> None:
    found = changes(MAX, ("a", 1, 1.0, True), ("b", 1, 2.5, True), ("a", 2, 3.0, False))
    assert {change.key: change.value for change in found} == {b"job:max:a": b"3", b"job:max:b": b"2.5"}


def test_several_columns_are_hash() -> None:
    (change,) = changes(StateDescriptor("all", key="sensor", value=["n", "temp", "ok"]), ("a", 7, 1.5, True))
    assert change.value is not None
    assert b"$1\r\nn\r\n$1\r\n7\r\n" in change.value
    assert b"$2\r\nok\r\n$4\r\ntrue\r\n" in change.value


def test_keys_of_other_slots_and_rows_without_key_are_left_out() -> None:
    slot = slot_of(b"job:max:a")
    found = changes(MAX, ("a", 1, 1.0, True), ("b", 1, 2.5, True), slots=SlotSet.of([(slot, slot)]))
    assert [change.key for change in found] == [b"job:max:a"]


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (StateDescriptor("s", key="place", value="temp"), "'s' of job 'job' needs the column 'place'"),
        (
            StateDescriptor("s", key="sensor", value="temp", columns={"temp": "bigint"}),
            "'temp' is bigint in the state, and double",
        ),
        (StateDescriptor("s", key="sensor", field="n", value="temp"), "one field of a hash in each row"),
        (StateDescriptor("s", key="sensor", value="temp", kind="list"), "is a list"),
        (StateDescriptor("s", key="sensor", value="n", reduce="sum"), "depends on earlier rows"),
    ],
)
def test_state_that_rows_do_not_make_is_refused(state: StateDescriptor, reason: str) -> None:
    with pytest.raises(DescriptorError, match=reason):
        RowEncoder("job", [state], schema_json(COLUMNS))


@pytest.mark.parametrize("damaged", [b"\1", b"\1\0\0\0", frame(("a", 1, 1.0, True))[:-1], b"\xff" * 40])
def test_damaged_frame_is_refused(damaged: bytes) -> None:
    with pytest.raises(CheckpointFormatError):
        RowEncoder("job", [MAX], schema_json(COLUMNS)).changes(damaged, ALL)


# In a process of its own: here other tests have imported all.
FIRST_ROW = """
import sys
import state_backend.fresh.writer
from state_backend.fresh.row_encoder import RowEncoder
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.slot_set import ALL, SlotSet

before = set(sys.modules)
schema, frame = bytes.fromhex(sys.argv[1]), bytes.fromhex(sys.argv[2])
for slots in (ALL, SlotSet.parse("0-8191")):
    RowEncoder("job", [StateDescriptor("max", key="sensor", value="temp")], schema).changes(frame, slots)
print(*set(sys.modules) - before)
"""


def test_first_row_imports_nothing_that_import_of_writer_has_not() -> None:
    """A server imports the writer in a thread, and handles rows in its event loop."""
    arguments = [schema_json(COLUMNS).hex(), frame(("a", 1, 1.0, True)).hex()]
    command = [sys.executable, "-c", FIRST_ROW, *arguments]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == []
