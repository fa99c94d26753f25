"""The files of a checkpoint: what Spark writes is read back; other bytes are a clear error or other rows, no crash."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from state_backend.checkpoint import metadata
from state_backend.checkpoint import records as records_module
from state_backend.checkpoint.compression import decompressed
from state_backend.checkpoint.decoding import RowFormat, decoded, of_family, without_delete_checksums
from state_backend.checkpoint.hashes import crc32c
from state_backend.checkpoint.records import Records, RecordType, change_log_records, delta_records, lineage_of
from state_backend.checkpoint.schemas import KeyEncoding, KeyForm, parse_store_schemas
from state_backend.checkpoint.spark_types import parse_schema
from state_backend.checkpoint.states import State, StateForm
from state_backend.model.errors import CheckpointError, CheckpointFormatError, UnsupportedStateError
from tests.golden_checkpoints import plain
from tests.properties.rows import struct_of, values_of
from tests.unit.state_backend.checkpoint import test_compression as frames
from tests.unit.state_backend.checkpoint import test_records as written_records
from tests.unit.state_backend.checkpoint import test_schemas as written_schemas
from tests.unsafe_rows import unsafe_row

NAME = "state/0/1/5.delta"
# Decompressed parts of a hostile file are no larger than a block of its codec.
PART_BYTES_MAX = 1 << 25


@contextmanager
def only_clear_errors() -> Iterator[None]:
    """Pass the errors that name a file, and no other ones."""
    try:
        yield
    except (CheckpointFormatError, UnsupportedStateError) as error:
        assert NAME in str(error)
        assert "checksum" in str(error) or "new checkpoint" not in str(error)


def changed(content: bytes, data: st.DataObject) -> bytes:
    """Return content with some other bytes, without some, or with more."""
    found = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(found) - 1)))
        size = data.draw(st.sampled_from([1, 1, 2, 4, 8]))
        found[at : at + size] = data.draw(st.binary(max_size=8) | st.sampled_from([b"\xff" * size, bytes(size)]))
    return bytes(found)


# -- frames ----------------------------------------------------------------------------


def read(content: bytes) -> bytes:
    parts = list(decompressed(pa.py_buffer(content), NAME))
    assert all(len(part) <= PART_BYTES_MAX for part in parts)
    return b"".join(parts)


@given(st.sampled_from(sorted(frames.CODECS)), st.binary(min_size=1, max_size=2000), st.data())
def test_compressed_frames_round_trip_and_damage_is_clear_error(
    codec: str, content: bytes, data: st.DataObject
) -> None:
    written = frames.CODECS[codec](content)
    assert read(written) == content
    with only_clear_errors():
        read(changed(written, data))


@given(st.sampled_from([b"LZ4Block", b"\x28\xb5\x2f\xfd", b"\x82SNAPPY\x00", b"ZV", b""]), st.binary(max_size=200))
def test_any_bytes_are_frames_or_clear_error(magic: bytes, content: bytes) -> None:
    with only_clear_errors():
        read(magic + content)


# -- records ----------------------------------------------------------------------------

KEYS = st.binary(max_size=20)
PLAIN_ITEMS = st.lists(
    st.tuples(st.just(RecordType.PUT), KEYS, st.binary(max_size=30))
    | st.tuples(st.just(RecordType.DELETE), KEYS, st.just(b"")),
    max_size=8,
)
ITEMS = st.lists(
    st.tuples(st.sampled_from([RecordType.PUT, RecordType.MERGE]), KEYS, st.binary(max_size=30))
    | st.tuples(st.just(RecordType.DELETE), KEYS, st.just(b"")),
    max_size=8,
)
LINEAGES = st.lists(st.tuples(st.integers(0, 1 << 60), st.text(max_size=10)), max_size=3)


def lineage(given: list[tuple[int, str]]) -> bytes:
    text = json.dumps([{"version": version, "checkpointUniqueId": name} for version, name in given]).encode()
    return struct.pack(">H", len(text)) + text


def items(blocks: Iterator[Records]) -> list[tuple[RecordType, bytes, bytes]]:
    return [item for block in blocks for item in block.items()]


def check_records(content: bytes, expected: list[Any], part: int, data: st.DataObject) -> None:
    """Read records that arrive in parts, and damaged ones."""
    assert items(change_log_records(written_records.parts(content, part), NAME)) == expected
    damaged = changed(content, data)
    for reader in (change_log_records, delta_records):
        with only_clear_errors():
            items(reader(written_records.parts(damaged, part), NAME))
    with only_clear_errors():
        lineage_of(written_records.parts(damaged, part), NAME)


@given(PLAIN_ITEMS, ITEMS, st.integers(1, 50), st.data())
def test_records_without_lineage_round_trip_and_damage_is_clear_error(
    plain_items: list[Any], kinds: list[Any], part: int, data: st.DataObject
) -> None:
    check_records(written_records.plain(plain_items), plain_items, part, data)
    check_records(b"\x00\x02v2" + written_records.with_kinds(kinds), kinds, part, data)


@given(PLAIN_ITEMS, ITEMS, LINEAGES, st.integers(1, 50), st.data())
def test_records_with_lineage_round_trip_and_damage_is_clear_error(
    plain_items: list[Any], kinds: list[Any], before: list[tuple[int, str]], part: int, data: st.DataObject
) -> None:
    v3 = b"\x00\x02v3" + lineage(before) + written_records.plain(plain_items)
    v4 = b"\x00\x02v4" + lineage(before) + written_records.with_kinds(kinds)
    for content, expected in ((v3, plain_items), (v4, kinds)):
        assert lineage_of(written_records.parts(content, part), NAME) == before
        check_records(content, expected, part, data)


@given(
    st.binary(max_size=60)
    | st.lists(st.integers(-3, 40), max_size=12).map(lambda each: struct.pack(f">{len(each)}i", *each))
)
def test_both_ways_of_splitting_records_agree_on_any_bytes(content: bytes) -> None:
    for has_kinds in (False, True):
        in_python = records_module.split_in_python(content, has_kinds, 1 << 20)
        assert records_module.split_records(content, has_kinds, 1 << 20) == in_python


# -- schemas and metadata ----------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
TYPE_TEXTS = st.sampled_from(
    ["long", "string", "decimal(9,2)", "decimal(39,1)", "decimal(9,99999999999999999999)", "decimal(5,-3)", "void", "x"]
)
TYPES = st.recursive(
    TYPE_TEXTS | JSON,
    lambda inner: st.one_of(
        inner.map(lambda kind: {"type": "array", "elementType": kind}),
        st.tuples(inner, inner).map(lambda pair: {"type": "map", "keyType": pair[0], "valueType": pair[1]}),
        st.lists(inner, max_size=3).map(
            lambda kinds: {
                "type": "struct",
                "fields": [{"name": f"c{at}", "type": each} for at, each in enumerate(kinds)],
            }
        ),
        inner.map(lambda kind: {"type": "udt", "sqlType": kind}),
    ),
    max_leaves=6,
)


@given(TYPES)
@example("decimal(9,99999999999999999999)")
@example({"type": "struct", "fields": [{"name": "\ud800", "type": "long"}]})
def test_any_json_is_type_or_clear_error(given_type: Any) -> None:
    with only_clear_errors():
        assert isinstance(parse_schema(json.dumps(given_type), NAME), pa.DataType)


@given(st.sampled_from(sorted(written_schemas.FILES)), st.data())
def test_damaged_schema_is_read_or_clear_error(version: str, data: st.DataObject) -> None:
    with only_clear_errors():
        parse_store_schemas(changed(written_schemas.FILES[version], data), NAME)


@given(st.sampled_from(list(KeyForm)), JSON, JSON)
@example(KeyForm.PREFIX, float("inf"), [])
@example(KeyForm.RANGE, 0, [float("inf")])
def test_any_json_is_key_encoding_or_clear_error(form: KeyForm, columns: Any, ordinals: Any) -> None:
    given_encoding = {"keyStateEncoderType": form, "numColsPrefixKey": columns, "orderingOrdinals": ordinals}
    before, after = written_schemas.FAMILY.split(written_schemas.texts(written_schemas.ENCODER))
    family = before + written_schemas.texts(json.dumps(given_encoding)) + after
    with only_clear_errors():
        parse_store_schemas(written_schemas.text("v3") + struct.pack(">i", 1) + family, NAME)


OPERATOR = {
    "operatorInfo": {"operatorId": 0, "operatorName": "dedupe"},
    "stateStoreInfo": [
        {"storeName": "default", "numColsPrefixKey": 0, "numPartitions": 2, "stateSchemaFilePaths": ["x"]}
    ],
    "operatorPropertiesJson": "{}",
}
COMMIT = {"nextBatchWatermarkMs": 7, "stateUniqueIds": {"0": [["a"], ["b"]]}}
OFFSETS = {"batchWatermarkMs": 0, "batchTimestampMs": 1, "conf": {"spark.sql.shuffle.partitions": "2"}}
PARSERS: dict[str, tuple[Callable[[bytes, str], Any], Any]] = {
    "operator": (metadata.parse_operator, OPERATOR),
    "commit": (metadata.parse_commit, COMMIT),
    "offsets": (metadata.parse_offsets, OFFSETS),
    "query": (metadata.parse_query_id, {"id": "x"}),
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths to all parts of a value of JSON."""
    yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in pairs:
        yield from places(each, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    if not path:
        return other
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = replaced(copied[path[0]], path[1:], other)
    return copied


@pytest.mark.parametrize("parser", PARSERS)
@given(JSON | st.just(float("inf")), st.data())
def test_metadata_is_parsed_and_any_json_within_is_parsed_or_clear_error(
    parser: str, other: Any, data: st.DataObject
) -> None:
    parse, whole = PARSERS[parser]
    lead = b"" if parser == "query" else b"v1\n"
    assert parse(lead + json.dumps(whole).encode(), NAME) is not None
    path = data.draw(st.sampled_from(list(places(whole))))
    with only_clear_errors():
        parse(lead + json.dumps(replaced(whole, path, other)).encode(), NAME)
    with only_clear_errors():
        parse(changed(lead + json.dumps(whole).encode(), data), NAME)


# -- keys and values of RocksDB ----------------------------------------------------------------------------

KEY = pa.struct([("word", pa.string()), ("number", pa.int32()), ("time", pa.timestamp("us", "UTC"))])
VALUE = struct_of([pa.int64(), pa.string()])
ENCODINGS = {
    "whole": KeyEncoding(),
    "prefix": KeyEncoding(KeyForm.PREFIX, 1),
    "prefix-2": KeyEncoding(KeyForm.PREFIX, 2),
    "time-last": KeyEncoding(KeyForm.TIME_LAST),
}
TEXTS = st.none() | st.text(max_size=8)
KEY_ROWS = st.tuples(TEXTS, st.none() | st.integers(-5, 5), st.integers(-(1 << 62), 1 << 62))
FAMILY = 3


def key_bytes(row: tuple[Any, ...], encoding: KeyEncoding) -> bytes:
    """Return a key as Spark's encoders write it. The time is a number, as rows have it."""
    kinds = [pa.string(), pa.int32(), pa.int64()]
    if encoding.form is KeyForm.WHOLE:
        return b"\0" + unsafe_row(row, struct_of(kinds))
    if encoding.form is KeyForm.TIME_LAST:
        return b"\0" + unsafe_row(row[:2], struct_of(kinds[:2])) + struct.pack(">Q", row[2] + (1 << 63))
    count = encoding.prefix_columns
    head = b"\0" + unsafe_row(row[:count], struct_of(kinds[:count]))
    return struct.pack("<i", len(head)) + head + b"\0" + unsafe_row(row[count:], struct_of(kinds[count:]))


def state(encoding: KeyEncoding, family: str | None, *, is_list: bool = False) -> State:
    return State(0, "operator", "state", StateForm.PLAIN, "default", family, KEY, VALUE, encoding, is_list=is_list)


def row_format(*, has_checksums: bool) -> RowFormat:
    return RowFormat(has_version=True, has_checksums=has_checksums, name=NAME)


def decode(records: Records, of: State, *, has_checksums: bool) -> pa.RecordBatch:
    [found] = without_delete_checksums([records], row_format(has_checksums=has_checksums))
    if of.family is not None:
        found = of_family(found, FAMILY)
    return decoded(found, of, row_format(has_checksums=has_checksums))


def with_times_as_numbers(rows: pa.RecordBatch) -> list[tuple[Any, ...]]:
    word, number, time = rows.column("key").flatten()
    return list(zip(word.to_pylist(), number.to_pylist(), time.cast(pa.int64()).to_pylist(), strict=True))


@given(st.sampled_from(sorted(ENCODINGS)), st.booleans(), st.lists(KEY_ROWS, min_size=1, max_size=5), st.data())
def test_keys_of_rocksdb_round_trip_and_damage_is_clear_error(
    encoding: str, has_family: bool, rows: list[tuple[Any, ...]], data: st.DataObject
) -> None:
    of = state(ENCODINGS[encoding], "state" if has_family else None)
    lead = struct.pack("<H", FAMILY) if has_family else b""
    value = b"\0" + unsafe_row((1, "x"), VALUE)
    given_items = [(RecordType.PUT, lead + key_bytes(row, of.encoding), value) for row in rows]
    assert with_times_as_numbers(decode(Records.of(given_items), of, has_checksums=False)) == rows
    other = [(op, changed(key, data), each) for op, key, each in given_items]
    with only_clear_errors():
        assert decode(Records.of(other), of, has_checksums=False).num_rows <= len(rows)


@given(
    st.lists(st.lists(values_of(VALUE, nullable=False), min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_lists_of_rocksdb_round_trip_and_damage_is_clear_error(
    elements: list[list[Any]], has_checksums: bool, has_commas: bool, data: st.DataObject
) -> None:
    of = state(KeyEncoding(), None, is_list=True)
    given_items = []
    for number, rows in enumerate(elements):
        key = key_bytes(("k", number, 0), of.encoding)
        parts = []
        for row in rows:
            element = b"\0" + unsafe_row(row, VALUE)
            part = struct.pack("<i", len(element)) + element
            checksum = struct.pack("<II", crc32c(part, crc32c(key)), len(part))
            parts.append(checksum + part if has_checksums else part)
        given_items.append((RecordType.PUT, key, (b"," if has_commas else b"").join(parts)))
    found = decode(Records.of(given_items), of, has_checksums=has_checksums)
    assert plain(found.column("value")) == elements
    other = [(op, key, changed(value, data)) for op, key, value in given_items]
    if has_checksums and other != given_items:
        with pytest.raises(CheckpointError):
            decode(Records.of(other), of, has_checksums=True)
    else:
        with only_clear_errors():
            decode(Records.of(other), of, has_checksums=has_checksums)


@given(
    st.lists(st.tuples(st.sampled_from(list(RecordType)), st.binary(max_size=40), st.binary(max_size=60)), max_size=4)
)
def test_any_bytes_are_keys_and_values_or_clear_error(given_items: list[tuple[RecordType, bytes, bytes]]) -> None:
    cleared = [(op, key, b"" if op is RecordType.DELETE else value) for op, key, value in given_items]
    for encoding in ENCODINGS.values():
        for is_list in (False, True):
            for has_checksums in (False, True):
                with only_clear_errors():
                    decode(Records.of(cleared), state(encoding, None, is_list=is_list), has_checksums=has_checksums)


def test_no_records_can_be_selected() -> None:
    assert len(Records.of([]).select(np.array([], np.int64))) == 0
