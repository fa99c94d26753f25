"""The benchmark of checksums compares functions with copies that check nothing."""

from __future__ import annotations

import pytest

from benchmarks.checksums import _without
from state_backend.lmdb import bulk_writer, record_format, record_reader
from state_backend.lmdb.bulk_writer import BulkWriter
from state_backend.model.errors import StoreDamagedError

NAME = b"job:v:1"
DAMAGED = record_format.HEADER.pack(len(NAME), 0, 0, record_format.VALUE) + NAME + b"value" + b"\0\0\0\0"


def test_copied_lookup_accepts_damaged_record() -> None:
    assert record_reader.find is record_format.find
    with pytest.raises(StoreDamagedError):
        record_format.find({b"at": DAMAGED}.get, b"at", NAME)
    assert _without(record_format.find, record_format)({b"at": DAMAGED}.get, b"at", NAME) == (b"at", DAMAGED)


def test_writer_has_checksum_and_another_function_has_none() -> None:
    assert _without(BulkWriter.put_run, bulk_writer) is not BulkWriter.put_run
    with pytest.raises(RuntimeError, match="has no checksum"):
        _without(record_format.read_meta, record_format)
