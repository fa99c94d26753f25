"""The child process that reads a RocksDB database, and writes all pairs to stdout.

    python rocksdb_process.py FOLDER BYTES      BYTES: the limit of its address space

    [key bytes i32][key][value bytes i32][value] ... [-1 i32], big endian, as in a delta file

It imports nothing of sparkis. It writes nothing into the database.
"""

from __future__ import annotations

import resource
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress

import rocksdict

WRITE_BYTES = 1 << 18


def main(folder: str, memory_bytes: int) -> None:
    """Write the pairs of a database."""
    with suppress(ValueError, OSError):  # macOS refuses such limits
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    # Without options, rocksdict takes those that the database's own file OPTIONS has: with Spark's merge operator.
    database = rocksdict.Rdict(folder, access_type=rocksdict.AccessType.read_only())
    size = struct.Struct(">i")
    pieces: list[bytes] = []
    total = 0
    for key, value in _items(database):
        pieces += (size.pack(len(key)), key, size.pack(len(value)), value)
        total += len(key) + len(value)
        if total > WRITE_BYTES:
            sys.stdout.buffer.write(b"".join(pieces))
            pieces.clear()
            total = 0
    pieces.append(size.pack(-1))
    sys.stdout.buffer.write(b"".join(pieces))


def _items(database: rocksdict.Rdict) -> Iterator[tuple[bytes, bytes]]:
    """Yield all pairs; an exception if a block cannot be read, where rocksdict's own iteration just ends."""
    last = None
    for key, value in database.items():
        assert isinstance(key, bytes) and isinstance(value, bytes), "the database is not open in raw mode"
        last = key
        yield key, value
    iterator = database.iter()
    iterator.seek_to_last()
    iterator.status()  # raises the error of a block
    if last != (iterator.key() if iterator.valid() else None):
        if last is None:
            iterator.seek_to_first()
        else:
            iterator.seek(last)
        while iterator.valid():
            iterator.next()
        iterator.status()
        raise AssertionError("RocksDB has more pairs than it has shown")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
