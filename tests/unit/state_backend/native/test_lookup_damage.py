"""No damaged page leads to a read outside of the map. Each case runs in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

from state_backend.codec.checksums import with_checksum
from state_backend.native import compiled_module

lookup = compiled_module("state_backend.native.lookup")
pytestmark = pytest.mark.compiled

PAGE_BYTES = 4096
MAP_BYTES = 64 * PAGE_BYTES

LOOK_UP = """
import os, sys
import lmdb
from state_backend.native import lookup

folder, map_bytes = sys.argv[1], int(sys.argv[2])
environment = lmdb.open(folder, readonly=True, max_dbs=3, lock=False, map_size=map_bytes)
pages = lookup.Pages(environment, os.open(folder + "/data.mdb", os.O_RDONLY))
with environment.begin() as txn:
    if not pages.learn(txn):
        print("refused")
    else:
        try:
            print(lookup.look_up(pages, "keys", [b"name%02d" % number for number in range(20)]).count(b"value"))
        except ValueError:
            print("damaged")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with lmdb.open(str(tmp_path), map_size=MAP_BYTES, max_dbs=3, sync=False) as environment:
        tables = [environment.open_db(name) for name in (b"keys", b"fields", b"blocks")]
        with environment.begin(write=True) as txn:
            for number in range(20):
                txn.put(b"name%02d" % number, with_checksum(b"value"), db=tables[0])
    return tmp_path


def looked_up(folder: Path, map_bytes: int = MAP_BYTES) -> str:
    command = [sys.executable, "-c", LOOK_UP, str(folder), str(map_bytes)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, (ended.returncode, ended.stderr[-1000:])
    return ended.stdout.strip()


def change(folder: Path, at: int, data: bytes) -> None:
    with (folder / "data.mdb").open("r+b") as file:
        file.seek(at)
        file.write(data)


def page_with(folder: Path, text: bytes) -> int:
    """Return the number of the last page that has a text: the one that is in use."""
    content = (folder / "data.mdb").read_bytes()
    return max(
        at for at in range(len(content) // PAGE_BYTES) if text in content[at * PAGE_BYTES : (at + 1) * PAGE_BYTES]
    )


def test_undamaged_store_is_read(folder: Path) -> None:
    assert looked_up(folder) == "20"


@pytest.mark.parametrize("number", [0, 1, 63, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_place_of_map_is_believed_only_as_file_has_it(folder: Path, number: int) -> None:
    place = page_with(folder, b"blocks")
    with (folder / "data.mdb").open("ab") as file:
        file.truncate(MAP_BYTES)
    change(folder, place * PAGE_BYTES, number.to_bytes(8, "little"))
    assert looked_up(folder) == "refused"


@pytest.mark.parametrize("number", [64, 1 << 10, (1 << 18) - 1])
def test_pages_beyond_map_are_not_read(folder: Path, number: int) -> None:
    place, root = page_with(folder, b"blocks"), page_with(folder, b"name19")
    content = (folder / "data.mdb").read_bytes()
    with (folder / "data.mdb").open("ab") as file:
        file.truncate((1 << 18) * PAGE_BYTES)  # a gigabyte with nothing in it
    # The record of the table ends with its root.
    at = content.index(root.to_bytes(8, "little"), content.index(b"keys", place * PAGE_BYTES))
    change(folder, at, number.to_bytes(8, "little"))
    assert looked_up(folder) in ("refused", "damaged")
