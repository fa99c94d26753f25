"""Records of a state as Arrow batches: the columns of the key, and those of the value.

A key of RocksDB, after the two bytes of its column family, if it has one:

    WHOLE       0 u8 | row
    PREFIX      bytes i32 | 0 u8 | row of the first columns | 0 u8 | row of the others; the bytes count the first 0, too
    TIME_LAST   0 u8 | row of all columns but the last | the last: an i64, big endian, with its highest bit inverted

A value of RocksDB is `0 u8 | row`. A value of a list has several elements `bytes i32 | 0 u8 | row`; a comma may stand
between two elements. The size of an element is one more than a multiple of 8, so its first byte is never a comma's. In
the HDFS-backed provider keys and values are rows.

With row checksums, the CRC-32C of key and value, u32, precedes the value: in RocksDB `checksum | bytes i32 | value`,
several times in lists; in the HDFS-backed provider `checksum | row`. A deleted key in a file is `checksum | key`.

Numbers are little endian where nothing else is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from state_backend.checkpoint.compression import damaged, unreadable
from state_backend.checkpoint.hashes import crc32c
from state_backend.checkpoint.records import Numbers, Records, RecordType
from state_backend.checkpoint.schemas import KeyForm
from state_backend.checkpoint.states import EMPTY_VALUE, State
from state_backend.checkpoint.unsafe_rows import decode_rows

FAMILY_BYTES = 2
CHECKSUM_BYTES = 4
SIZE_BYTES = 4
EMPTY_VALUE_BYTES = 16
ROW_VERSION = 0  # of both, keys and values
COMMA = 0x2C


@dataclass(frozen=True)
class RowFormat:
    """How a provider writes keys and values.

    Args:
        has_version: A version byte precedes each row.
        name: The name, for errors.
    """

    has_version: bool
    has_checksums: bool
    name: str


def without_delete_checksums(blocks: Iterable[Records], row_format: RowFormat) -> Iterator[Records]:
    """Yield records whose deleted keys have lost their checksums, so that keys can be compared."""
    for records in blocks:
        is_deleted = records.ops == RecordType.DELETE
        if row_format.has_checksums and is_deleted.any():
            _check_deletes(records, is_deleted, row_format.name)
            skipped = np.where(is_deleted, CHECKSUM_BYTES, 0)
            yield Records(
                records.content,
                records.ops,
                records.keys + skipped,
                records.key_sizes - skipped,
                records.values,
                records.value_sizes,
            )
        else:
            yield records


def _check_deletes(records: Records, is_deleted: npt.NDArray[np.bool_], name: str) -> None:
    for at, size in zip(records.keys[is_deleted].tolist(), records.key_sizes[is_deleted].tolist(), strict=True):
        if size < CHECKSUM_BYTES:
            raise unreadable(name, "a deleted key is shorter than its checksum")
        expected = int.from_bytes(records.content[at : at + CHECKSUM_BYTES], "little")
        if crc32c(records.content[at + CHECKSUM_BYTES : at + size]) != expected:
            raise damaged(name, "the checksum of a deleted key does not match")


def of_family(records: Records, family: int) -> Records:
    """Return the records of a column family of RocksDB, with the family's number still in their keys."""
    if len(records) and (records.key_sizes < FAMILY_BYTES).any():
        records = records.select(records.key_sizes >= FAMILY_BYTES)
    content = np.frombuffer(records.content, np.uint8)
    numbers = content[records.keys] | content[records.keys + 1].astype(np.uint16) << 8
    return records.select(numbers == family)


def decoded(records: Records, state: State, row_format: RowFormat) -> pa.RecordBatch:
    """Return records of one state as the columns `op` (see `records.RecordType`), `key` and `value`.

    The value is a struct, null where the key is deleted; a list of structs if the state is a list.
    """
    is_present = records.ops != RecordType.DELETE
    present = records if is_present.all() else records.select(is_present)
    key = _keys(records, state, row_format)
    value = (_lists if state.is_list else _values)(present, state, row_format)
    if present is not records:
        value = value.take(pa.array(np.cumsum(is_present) - 1, pa.int64(), mask=~is_present))
    return pa.RecordBatch.from_arrays([pa.array(records.ops), key, value], ["op", "key", "value"])


def _keys(records: Records, state: State, row_format: RowFormat) -> pa.StructArray:
    starts, sizes, name = records.keys, records.key_sizes, row_format.name
    content = records.content
    if not row_format.has_version:
        return decode_rows(content, starts, sizes, state.key, name)
    if state.family is not None:
        starts, sizes = starts + FAMILY_BYTES, sizes - FAMILY_BYTES
    encoding = state.encoding
    if encoding.form is KeyForm.WHOLE:
        return decode_rows(content, *_versioned(content, starts, sizes, name), state.key, name)
    if encoding.form is KeyForm.TIME_LAST:
        row_type = pa.struct(list(state.key)[:-1])
        rows = decode_rows(content, *_versioned(content, starts, sizes - 8, name), row_type, name)
        times = _numbers(content, starts + sizes - 8, 8, name).view(">u8")[:, 0] ^ np.uint64(1 << 63)
        last = pa.array(times.astype(np.int64)).cast(state.key.field(len(rows.type)).type)
        return pa.StructArray.from_arrays([*rows.flatten(), last], fields=list(state.key))
    head_sizes = _numbers(content, starts, SIZE_BYTES, name).view("<i4")[:, 0].astype(np.int64)
    if len(starts) and ((head_sizes < 0).any() or (head_sizes > sizes - SIZE_BYTES).any()):
        raise unreadable(name, "the prefix of a key is longer than the key")
    fields = list(state.key)
    head_type, rest_type = pa.struct(fields[: encoding.prefix_columns]), pa.struct(fields[encoding.prefix_columns :])
    heads = decode_rows(content, *_versioned(content, starts + SIZE_BYTES, head_sizes, name), head_type, name)
    after = SIZE_BYTES + head_sizes
    rest = decode_rows(content, *_versioned(content, starts + after, sizes - after, name), rest_type, name)
    return pa.StructArray.from_arrays([*heads.flatten(), *rest.flatten()], fields=fields)


def _values(records: Records, state: State, row_format: RowFormat) -> pa.StructArray:
    starts, sizes, name = records.values, records.value_sizes, row_format.name
    content = records.content
    if row_format.has_checksums:
        starts, sizes = _checked(records, row_format)
    if row_format.has_version:
        starts, sizes = _versioned(content, starts, sizes, name)
    else:
        sizes = sizes & ~7  # Spark before 2.3 wrote a few bytes too many
    if state.value.equals(EMPTY_VALUE):
        _check_empty(content, starts, sizes, name)
    return decode_rows(content, starts, sizes, state.value, name)


def _check_empty(content: bytes, starts: Numbers, sizes: Numbers, name: str) -> None:
    """Raise CheckpointFormatError for a value that is not a row of one null: it is not that of dropDuplicates."""
    nulls = _numbers(content, starts, 1, name)
    if (sizes != EMPTY_VALUE_BYTES).any() or (nulls != 1).any():
        raise unreadable(name, "dropDuplicates keeps keys only, and a key has a value")


def _checked(records: Records, row_format: RowFormat) -> tuple[Numbers, Numbers]:
    """Return where values begin after their checksums, and their sizes; check the checksums."""
    lead = CHECKSUM_BYTES + (SIZE_BYTES if row_format.has_version else 0)
    if len(records) and (records.value_sizes < lead).any():
        raise unreadable(row_format.name, "a value is shorter than its checksum")
    for _, key, value in records.items():
        size = int.from_bytes(value[CHECKSUM_BYTES:lead], "little") if row_format.has_version else len(value) - lead
        if size != len(value) - lead:
            raise unreadable(row_format.name, "a value has another size than its checksum says")
        _check_value(key, value[:CHECKSUM_BYTES], value[lead:], row_format.name)
    return records.values + lead, records.value_sizes - lead


def _check_value(key: bytes, checksum: bytes, value: bytes, name: str) -> None:
    if crc32c(value, crc32c(key)) != int.from_bytes(checksum, "little"):
        raise damaged(name, "the checksum of a value does not match")


def _lists(records: Records, state: State, row_format: RowFormat) -> pa.ListArray:
    """Return the values of a list: a list of rows for each record."""
    starts: list[int] = []
    sizes: list[int] = []
    offsets = [0]
    for record, (_, key, value) in enumerate(records.items()):
        base = int(records.values[record])
        for piece, piece_end in _pieces(key, value, row_format):
            for at, size in _sized(value, piece, piece_end, row_format.name):
                starts.append(base + at)
                sizes.append(size)
        offsets.append(len(starts))
    rows = _versioned(records.content, np.array(starts, np.int64), np.array(sizes, np.int64), row_format.name)
    elements = decode_rows(records.content, *rows, state.value, row_format.name)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), elements)


def _pieces(key: bytes, value: bytes, row_format: RowFormat) -> Iterator[tuple[int, int]]:
    """Yield the parts of a list's value that have one checksum each, or the whole value."""
    if not row_format.has_checksums:
        yield 0, len(value)
        return
    at, lead = 0, CHECKSUM_BYTES + SIZE_BYTES
    while at < len(value):
        # A comma's byte is a separator, or the first byte of a checksum. The size and the checksum decide.
        for start in (at, at + 1) if value[at] == COMMA and at else (at,):
            end = start + lead + int.from_bytes(value[start + CHECKSUM_BYTES : start + lead], "little")
            if end <= len(value) and crc32c(value[start + lead : end], crc32c(key)) == int.from_bytes(
                value[start : start + CHECKSUM_BYTES], "little"
            ):
                break
        else:
            raise damaged(row_format.name, "the checksum of a list does not match")
        yield start + lead, end
        at = end


def _sized(value: bytes, at: int, end: int, name: str) -> Iterator[tuple[int, int]]:
    """Yield where the elements of a list begin, and their sizes."""
    while at < end:
        if value[at] == COMMA:
            at += 1
        size = int.from_bytes(value[at : at + SIZE_BYTES], "little")
        at += SIZE_BYTES
        if not 0 < size <= end - at:
            raise unreadable(name, "an element of a list is longer than the list")
        yield at, size
        at += size


def _versioned(content: bytes, starts: Numbers, sizes: Numbers, name: str) -> tuple[Numbers, Numbers]:
    """Return where rows begin after their version byte, and their sizes; check the byte."""
    if len(starts):
        if (sizes < 1).any() or (starts < 0).any() or (starts + sizes > len(content)).any():
            raise unreadable(name, "a row is shorter than its version")
        versions = np.frombuffer(content, np.uint8)[starts]
        if (versions != ROW_VERSION).any():
            raise unreadable(name, f"a row has the version {int(versions.max())}; sparkis reads version {ROW_VERSION}")
    return starts + 1, sizes - 1


def _numbers(content: bytes, starts: Numbers, width: int, name: str) -> npt.NDArray[np.uint8]:
    """Return `width` bytes at each position, as rows of an array."""
    if not len(starts):
        return np.empty((0, width), np.uint8)
    if (starts < 0).any() or (starts + width > len(content)).any():
        raise unreadable(name, "a key is shorter than its parts")
    return np.lib.stride_tricks.sliding_window_view(np.frombuffer(content, np.uint8), width)[starts]
