"""Checks a store's file for damage: its length, and the order, the store key and the checksum of each row.

LMDB itself checks very little: it maps the file and follows its pointers. A read behind the end of a truncated file,
or through a damaged pointer, ends the process with a signal (SIGBUS).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import islice
from operator import ge
from pathlib import Path
from typing import Any

import lmdb

from state_backend.codec.checksums import CRC_RESIDUE, checksum
from state_backend.lmdb.record_format import FIELD_POSITION_BYTES, ID_BYTES, Tables, field_store_key, name_of
from state_backend.model.errors import StoreDamagedError
from state_backend.model.slots import POSITION_BYTES, store_keys_of

# LMDB's errors for a file that it cannot read.
DAMAGE_ERRORS = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.PanicError,
    lmdb.ProblemError,
    lmdb.IncompatibleError,
    lmdb.BadTxnError,
    lmdb.CursorFullError,
    lmdb.PageFullError,
)
# The first two pages are meta pages: a header of 16 bytes, magic u32, version u32, ...; the size of a page is a u32 at
# offset 40, the last page's number a u64 at offset 136.
META_PAGES, PAGE_BYTES_AT, LAST_PAGE_AT, META_BYTES = 2, 40, 136, 152
PAGE_BYTES_MIN, PAGE_BYTES_MAX = 512, 65_536
# The number of rows that are checked together; a row may be a piece of a long value, of 64 KiB.
ROWS = 256
# The CRC-32 of an empty value: the rows of the expiry index and of `field_expiry` have no value.
CRC_EMPTY = 0


def as_damage(error: Exception) -> StoreDamagedError | None:
    """Return a StoreDamagedError for an error that means a damaged file; None for any other error."""
    if isinstance(error, DAMAGE_ERRORS):
        return StoreDamagedError(f"{error}; the store is rebuilt from the log, retry in a moment")
    return error if isinstance(error, StoreDamagedError) else None


def check_length(path: Path) -> None:
    """Raise StoreDamagedError for a file that lacks some of its pages; a missing or empty file is a new store."""
    try:
        with open(path, "rb") as file:
            pages = file.read(PAGE_BYTES_MAX + META_BYTES)
            size = file.seek(0, 2)
    except FileNotFoundError:
        return
    if not size:
        return
    needed = 0
    if len(pages) >= META_BYTES:
        (page_bytes,) = struct.unpack_from("<I", pages, PAGE_BYTES_AT)
        if PAGE_BYTES_MIN <= page_bytes <= PAGE_BYTES_MAX and len(pages) >= page_bytes + META_BYTES:
            last = (struct.unpack_from("<Q", pages, at * page_bytes + LAST_PAGE_AT)[0] for at in range(META_PAGES))
            needed = (max(last) + 1) * page_bytes
    if not 0 < needed <= size:
        raise StoreDamagedError(f"{path} has {size} bytes, but its pages need {needed or 'more'}")


def verify(txn: lmdb.Transaction[bytes], tables: Tables) -> None:
    """Read all rows, and look each up as a reader does; StoreDamagedError for the first damaged one.

    Takes about a second for a million rows (measured: `python -m benchmarks checksums`).
    """
    for name, table in zip(Tables._fields, tables, strict=True):
        _verify_table(txn, name, table)


def _verify_table(txn: lmdb.Transaction[bytes], name: str, table: Any) -> None:
    seen = 0
    last = b""
    with txn.cursor(db=table) as rows, txn.cursor(db=table) as reader:
        names = rows.iternext(values=False) if rows.first() else iter(())
        while chunk := list(islice(names, ROWS)):
            found = reader.getmulti(chunk)
            values = [value for _, value in found]
            if (chunk[0] <= last and seen) or any(map(ge, chunk, chunk[1:])):
                raise _damaged(name, "a row is out of order")
            if [at for at, _ in found] != chunk:
                raise _damaged(name, "a row is not found by its name")
            if not {CRC_RESIDUE, CRC_EMPTY}.issuperset(map(checksum, values)):
                raise _damaged(name, "a checksum does not match")
            if name in ("keys", "fields"):
                _check_store_keys(name, chunk, values, last)
            seen += len(chunk)
            last = chunk[-1]
    if seen != txn.stat(table)["entries"]:
        raise _damaged(name, f"it has {seen} rows, and LMDB counts {txn.stat(table)['entries']}")


def _check_store_keys(table: str, store_keys: Sequence[bytes], records: Sequence[bytes], last: bytes) -> None:
    """Check that a look-up finds each record: it is at the position of its name, and ordinals there have no gap."""
    names = list(map(name_of, records))
    if table == "keys":
        length, positions = POSITION_BYTES, list(store_keys_of(names))
    else:
        length = ID_BYTES + FIELD_POSITION_BYTES
        ids = (int.from_bytes(store_key[:ID_BYTES], "big") for store_key in store_keys)
        positions = list(map(field_store_key, ids, names))
    if [store_key[:length] for store_key in store_keys] != positions:
        raise _damaged(table, "a record is not at its key's or field's position")
    for store_key, before in zip(store_keys, [last, *store_keys], strict=False):
        ordinal = int.from_bytes(store_key[length:], "big")
        if ordinal and before != store_key[:length] + ((ordinal - 1).to_bytes(2, "big") if ordinal > 1 else b""):
            raise _damaged(table, "an ordinal is missing")


def _damaged(table: str, problem: str) -> StoreDamagedError:
    return StoreDamagedError(f"the table of {table} is damaged: {problem}")
