"""The records of delta, snapshot and change-log files, in blocks of bounded size.

    delta, snapshot, changelog v1   [key bytes i32][key][value bytes i32][value]     put
                                    [key bytes i32][key][-1 i32]                     delete
                                    [-1 i32]                                         end
    changelog v2                    [2 u16]["v2"], then
                                    [kind u8][key bytes i32][key][value bytes i32][value]   kind 1 put, 17 merge
                                    [16 u8][key bytes i32][key][-1 i32]                     delete
                                    [0 u8]                                                  end
    changelog v3, v4                [2 u16]["v3" or "v4"][bytes u16][lineage, JSON], then as v1, v2

All numbers are big endian. A file without its end cannot be read.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from state_backend.checkpoint.compression import unreadable
from state_backend.model.errors import UnsupportedStateError
from state_backend.native import state_files

# The size of a block of records, approximately; a longer record makes its block longer.
BLOCK_BYTES = 1 << 22
# A longer key or value counts as damage (standard: Redis' longest value).
RECORD_BYTES_MAX = 1 << 29
HEADERS = {b"\x00\x02v2": 2, b"\x00\x02v3": 3, b"\x00\x02v4": 4}
HEADER_BYTES = 4

Numbers = npt.NDArray[np.int64]


class RecordType(IntEnum):
    """The types of records; the numbers are those of changelog v2."""

    PUT = 1
    DELETE = 16
    MERGE = 17


@dataclass(frozen=True)
class Records:
    """Records in a buffer: where each key and each value begins, and its size; -1 for the value of a deleted key."""

    content: bytes
    ops: npt.NDArray[np.uint8]
    keys: Numbers
    key_sizes: Numbers
    values: Numbers
    value_sizes: Numbers

    def __len__(self) -> int:
        return len(self.ops)

    def select(self, which: npt.NDArray[Any]) -> Records:
        """Return some of the records, by a mask or by indices."""
        return Records(
            self.content,
            self.ops[which],
            self.keys[which],
            self.key_sizes[which],
            self.values[which],
            self.value_sizes[which],
        )

    def items(self) -> Iterator[tuple[RecordType, bytes, bytes]]:
        """Yield kind, key and value; the value of a deleted key is empty."""
        content = self.content
        columns = (self.ops, self.keys, self.key_sizes, self.values, self.value_sizes)
        for op, key, key_size, value, value_size in zip(*(column.tolist() for column in columns), strict=True):
            yield RecordType(op), content[key : key + key_size], content[value : value + max(0, value_size)]

    def last_key(self) -> bytes:
        """Return the key of the last record."""
        start = int(self.keys[-1])
        return self.content[start : start + int(self.key_sizes[-1])]

    @classmethod
    def joined(cls, parts: Sequence[Records]) -> Records:
        """Return the records of several buffers as those of one."""
        if len(parts) == 1:
            return parts[0]
        starts = np.cumsum([0, *(len(part.content) for part in parts[:-1])])
        return cls(
            b"".join(part.content for part in parts),
            np.concatenate([part.ops for part in parts]),
            np.concatenate([part.keys + start for part, start in zip(parts, starts, strict=True)]),
            np.concatenate([part.key_sizes for part in parts]),
            np.concatenate([part.values + start for part, start in zip(parts, starts, strict=True)]),
            np.concatenate([part.value_sizes for part in parts]),
        )

    @classmethod
    def of(cls, items: Iterable[tuple[RecordType, bytes, bytes]]) -> Records:
        """Return records of given keys and values."""
        given = list(items)
        pieces = list(chain.from_iterable((key, value) for _, key, value in given))
        sizes = np.fromiter(map(len, pieces), np.int64, len(pieces))
        starts = np.cumsum(sizes) - sizes
        ops = np.fromiter((op for op, _, _ in given), np.uint8, len(given))
        value_sizes = np.where(ops == RecordType.DELETE, -1, sizes[1::2])
        return cls(b"".join(pieces), ops, starts[::2], sizes[::2], starts[1::2], value_sizes)


def delta_records(parts: Iterable[bytes], name: str) -> Iterator[Records]:
    """Yield the records of a delta or a snapshot of the HDFS-backed provider."""
    return _blocks(iter(parts), b"", name, has_kinds=False)


def change_log_records(parts: Iterable[bytes], name: str) -> Iterator[Records]:
    """Yield the records of a change log of RocksDB, in any of its versions."""
    head, rest, version, _ = _header(iter(parts), name)
    return _blocks(rest, head, name, has_kinds=version in (2, 4))


def lineage_of(parts: Iterable[bytes], name: str) -> list[tuple[int, str]]:
    """Return the versions and ids that the header of a change log v3 or v4 names; none for other versions."""
    return _header(iter(parts), name)[3]


def _header(parts: Iterator[bytes], name: str) -> tuple[bytes, Iterator[bytes], int, list[tuple[int, str]]]:
    """Return the bytes after the header that have been read, the rest, the version and the lineage."""
    head = _read_at_least(b"", parts, HEADER_BYTES)
    version = HEADERS.get(head[:HEADER_BYTES])
    if version is None:
        # A change log v1 begins with the size of a key. A size of 161 KiB with the letter `v` is a newer version.
        if head[:3] == b"\x00\x02v" and head[3:4].isdigit():
            raise UnsupportedStateError(f"{name} is a change log of version {head[2:4]!r}; sparkis reads v1 to v4")
        return head, parts, 1, []
    head = head[HEADER_BYTES:]
    if version == 2:
        return head, parts, version, []
    head = _read_at_least(head, parts, 2)
    size = int.from_bytes(head[:2], "big")
    head = _read_at_least(head, parts, 2 + size)
    if len(head) < 2 + size:
        raise unreadable(name, "it ends within its lineage")
    try:
        items = json.loads(head[2 : 2 + size])
        lineage = [(int(item["version"]), str(item["checkpointUniqueId"])) for item in items]
    except (ArithmeticError, ValueError, KeyError, TypeError, RecursionError):
        raise unreadable(name, "its lineage is in no form that sparkis knows") from None
    return head[2 + size :], parts, version, lineage


def _read_at_least(head: bytes, parts: Iterator[bytes], size: int) -> bytes:
    while len(head) < size:
        part = next(parts, None)
        if part is None:
            break
        head += part
    return head


def _blocks(parts: Iterator[bytes], head: bytes, name: str, *, has_kinds: bool) -> Iterator[Records]:
    """Yield records in blocks. The bytes of an incomplete record become the beginning of the next block."""
    wanted = BLOCK_BYTES
    while True:
        pieces, size = [head], len(head)
        for part in parts:
            pieces.append(part)
            size += len(part)
            if size >= wanted:
                break
        content = b"".join(pieces)
        is_last = size < wanted
        records, at, has_ended = _split(content, name, has_kinds=has_kinds)
        if len(records):
            yield records
        if has_ended:
            if at < len(content) or next(parts, b""):
                raise unreadable(name, "there are bytes after its end")
            return
        if is_last:
            raise unreadable(name, "it is truncated: its end mark is missing")
        head = content[at:]
        wanted = max(BLOCK_BYTES, 2 * len(head))


def _split(content: bytes, name: str, *, has_kinds: bool) -> tuple[Records, int, bool]:
    """Return the complete records of a buffer, where the rest begins, and whether that is after the end mark."""
    ops, table, at, has_ended, wrong = split_records(content, has_kinds, RECORD_BYTES_MAX)
    if wrong is not None:
        raise unreadable(name, wrong)
    keys, key_sizes, values, value_sizes = np.frombuffer(table, np.int64).reshape(-1, 4).T
    return Records(content, np.frombuffer(ops, np.uint8), keys, key_sizes, values, value_sizes), at, has_ended


SIZE = struct.Struct(">i")


def split_in_python(
    content: bytes, has_kinds: bool, record_bytes_max: int
) -> tuple[bytes, bytes, int, bool, str | None]:
    """Find the complete records at the beginning of a buffer.

    Returns the records' kinds; of each record the positions and sizes of key and value, as four i64; where the rest
    begins; whether that is after the end mark; and what is wrong there, if anything.
    """
    ops, table = bytearray(), array("q")
    read, end, lead = SIZE.unpack_from, len(content), 1 if has_kinds else 0
    at, has_ended, wrong = 0, False, None
    while at < end:
        op = 0
        if has_kinds:
            op = content[at]
            if op == 0:
                at, has_ended = at + 1, True
                break
            if op not in (RecordType.PUT, RecordType.DELETE, RecordType.MERGE):
                wrong = f"a record has the unknown kind {op}"
                break
        if at + lead + 4 > end:
            break
        (key_size,) = read(content, at + lead)
        if key_size == -1 and not has_kinds:
            at, has_ended = at + 4, True
            break
        if not 0 <= key_size <= record_bytes_max:
            wrong = f"a key has the size {key_size}"
            break
        key = at + lead + 4
        value = key + key_size + 4
        if value > end:
            break
        (value_size,) = read(content, value - 4)
        if not -1 <= value_size <= record_bytes_max or (has_kinds and (value_size == -1) != (op == RecordType.DELETE)):
            wrong = f"a value has the size {value_size}"
            break
        after = value + max(0, value_size)
        if after > end:
            break
        ops.append(op or (RecordType.DELETE if value_size == -1 else RecordType.PUT))
        table.extend((key, key_size, value, value_size))
        at = after
    return bytes(ops), table.tobytes(), at, has_ended, wrong


split_records = split_in_python if state_files is None else state_files.split_records
