"""Records of delta files and change logs: what Spark writes is read, in blocks of any size; damage is an error."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest

from state_backend.checkpoint import records as records_module
from state_backend.checkpoint.records import (
    Records,
    RecordType,
    change_log_records,
    delta_records,
    lineage_of,
    split_in_python,
    split_records,
)
from state_backend.model.errors import CheckpointFormatError, UnsupportedStateError

ITEMS = [
    (RecordType.PUT, b"a", b"first"),
    (RecordType.DELETE, b"bb", b""),
    (RecordType.PUT, b"a", b""),
    (RecordType.PUT, b"", b"value of an empty key"),
]
LINEAGE = b'[{"version":3,"checkpointUniqueId":"x-1"},{"version":4,"checkpointUniqueId":"y-2"}]'


def sized(content: bytes) -> bytes:
    return struct.pack(">i", len(content)) + content


def plain(items: list[tuple[RecordType, bytes, bytes]]) -> bytes:
    end = struct.pack(">i", -1)
    return b"".join(sized(key) + (end if op is RecordType.DELETE else sized(value)) for op, key, value in items) + end


def with_kinds(items: list[tuple[RecordType, bytes, bytes]]) -> bytes:
    end = struct.pack(">i", -1)
    return (
        b"".join(
            bytes([op]) + sized(key) + (end if op is RecordType.DELETE else sized(value)) for op, key, value in items
        )
        + b"\0"
    )


MERGED = [*ITEMS, (RecordType.MERGE, b"a", b"appended")]
HEADER = struct.pack(">H", len(LINEAGE)) + LINEAGE
FILES = {
    "v1": (plain(ITEMS), ITEMS),
    "v2": (b"\x00\x02v2" + with_kinds(MERGED), MERGED),
    "v3": (b"\x00\x02v3" + HEADER + plain(ITEMS), ITEMS),
    "v4": (b"\x00\x02v4" + HEADER + with_kinds(MERGED), MERGED),
}


def parts(content: bytes, size: int) -> Iterator[bytes]:
    return (content[at : at + size] for at in range(0, len(content), size))


def items(blocks: Iterator[Records]) -> list[tuple[RecordType, bytes, bytes]]:
    return [item for records in blocks for item in records.items()]


@pytest.mark.parametrize("version", FILES)
@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("block_bytes", [1, 16, 1 << 20])
def test_records_are_read_in_any_parts(
    version: str, size: int, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records_module, "BLOCK_BYTES", block_bytes)
    content, written = FILES[version]
    assert items(change_log_records(parts(content, size), "5.changelog")) == written


@pytest.mark.parametrize("version", FILES)
def test_truncated_file_is_error(version: str) -> None:
    content, _ = FILES[version]
    for size in range(len(content)):
        with pytest.raises(CheckpointFormatError, match=r"5\.changelog cannot be read"):
            items(change_log_records(iter([content[:size]]), "5.changelog"))


@pytest.mark.parametrize("version", FILES)
def test_bytes_after_end_are_error(version: str) -> None:
    content, _ = FILES[version]
    for size in (1, 10_000):
        with pytest.raises(CheckpointFormatError, match="after its end"):
            items(change_log_records(parts(content + b"x", size), "5.changelog"))


@pytest.mark.parametrize("version", FILES)
def test_flipped_bit_is_error_or_changes_records(version: str) -> None:
    content, written = FILES[version]
    lineage = range(content.find(LINEAGE), content.find(LINEAGE) + len(LINEAGE)) if LINEAGE in content else ()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            found = items(change_log_records(iter([bytes(flipped)]), "5.changelog"))
        except (CheckpointFormatError, UnsupportedStateError) as error:
            assert str(error).startswith("5.changelog ")
        else:
            assert found != written or bit // 8 in lineage, bit  # a lineage may name other versions


def test_lineage_names_earlier_versions() -> None:
    assert lineage_of(iter([FILES["v4"][0]]), "x") == [(3, "x-1"), (4, "y-2")]
    assert lineage_of(iter([FILES["v1"][0]]), "x") == []


def test_newer_change_log_is_refused_by_its_version() -> None:
    with pytest.raises(UnsupportedStateError, match="v5"):
        items(change_log_records(iter([b"\x00\x02v5rest"]), "x"))


def test_records_are_made_of_keys_and_values() -> None:
    assert list(Records.of(MERGED).items()) == MERGED


def test_delta_without_rows_has_no_records() -> None:
    assert items(delta_records(iter([struct.pack(">i", -1)]), "x")) == []


@pytest.mark.parametrize("has_kinds", [False, True])
def test_compiled_core_splits_as_python_does(has_kinds: bool) -> None:
    content = with_kinds(MERGED) if has_kinds else plain(ITEMS)
    cut = [content[:size] for size in range(len(content) + 1)]
    flipped = [bytes(byte ^ (at == index) for index, byte in enumerate(content)) for at in range(len(content))]
    inverted = [bytes(byte ^ (255 * (at == index)) for index, byte in enumerate(content)) for at in range(len(content))]
    for each in (*cut, *flipped, *inverted):
        assert split_records(each, has_kinds, 1 << 20) == split_in_python(each, has_kinds, 1 << 20)
