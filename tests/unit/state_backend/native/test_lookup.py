"""The compiled look-up finds the records that LMDB finds, and refuses pages that LMDB does not write."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from binascii import crc_hqx
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import lmdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from state_backend.codec.checksums import with_checksum
from state_backend.lmdb.record_format import HEADER
from state_backend.model.slots import slot_of
from state_backend.native import compiled_module

lookup = compiled_module("state_backend.native.lookup")
pytestmark = pytest.mark.compiled

TABLES = ("keys", "fields", "blocks")
NAME_BYTES = {"keys": (6, 8), "fields": (14, 16), "blocks": (16,)}


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[lmdb.Environment]:
    made = lmdb.open(str(tmp_path), map_size=1 << 30, max_dbs=len(TABLES), sync=False)
    yield made
    made.close()


def fill(environment: lmdb.Environment, dice: random.Random, count: int) -> dict[str, dict[bytes, bytes]]:
    """Put records of all sizes into each table, some of them twice; return what is there."""
    held: dict[str, dict[bytes, bytes]] = {}
    tables = {name: environment.open_db(name.encode()) for name in TABLES}
    with environment.begin(write=True) as txn:
        for name, table in tables.items():
            rows = held[name] = {}
            for _ in range(count):
                size = dice.choice((0, 1, 20, 90, 2_000, 4_081, 9_000, 70_000)) if dice.random() < 0.1 else 40
                key = dice.randbytes(dice.choice(NAME_BYTES[name]))
                rows[key] = (HEADER.pack(4, 0, 0, 0) + b"name" if name == "keys" else b"") + dice.randbytes(size)
                txn.put(key, with_checksum(rows[key]), db=table)
    return held


def pages_of(environment: lmdb.Environment) -> lookup.Pages:
    descriptor = os.open(Path(environment.path()) / "data.mdb", os.O_RDONLY)
    return lookup.Pages(environment, descriptor)


@pytest.mark.parametrize("count", [0, 1, 30, 3_000])
def test_lookup_finds_exactly_keys_of_lmdb(environment: lmdb.Environment, count: int) -> None:
    dice = random.Random(count)
    held = fill(environment, dice, count)
    pages = pages_of(environment)
    with environment.begin() as txn:
        assert pages.learn(txn)
        for table, rows in held.items():
            names = [*rows, *(dice.randbytes(dice.choice((3, *NAME_BYTES[table]))) for _ in range(200))]
            dice.shuffle(names)
            for at in range(0, len(names), 50):
                some = names[at : at + 50]
                assert lookup.look_up(pages, table, some) == [rows.get(name) for name in some]


def test_transactions_own_version_is_read_while_others_are_written(environment: lmdb.Environment) -> None:
    dice = random.Random(1)
    before = fill(environment, dice, 500)["keys"]
    pages = pages_of(environment)
    with environment.begin() as txn:
        assert pages.learn(txn)
        for _ in range(5):
            fill(environment, dice, 500)
            names = dice.sample(list(before), 50)
            assert lookup.look_up(pages, "keys", names) == [before[name] for name in names]


NUMBERS = [0, 1, 2, 255, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 2, (1 << 64) - 1]


@pytest.mark.parametrize("seed", range(4))
def test_names_after_few_ids_are_found_at_any_position(environment: lmdb.Environment, seed: int) -> None:
    """Where a name stands is guessed from the numbers of its neighbours: these lie as unevenly as they can."""
    dice = random.Random(seed)
    ids = dice.sample(NUMBERS, 4) if seed else NUMBERS

    def name() -> bytes:
        number = dice.choice((dice.choice(NUMBERS), dice.randrange(1000), dice.randrange(1 << 64)))
        return dice.choice(ids).to_bytes(8, "big") + number.to_bytes(8, "big")

    fill(environment, dice, 0)
    pages = pages_of(environment)
    for count in (1, 2, 40, 3_000):
        rows = {name(): b"%d" % number for number in range(count)}
        with environment.begin(write=True) as txn:
            for each, value in rows.items():
                txn.put(each, with_checksum(value), db=environment.open_db(b"blocks", txn))
        with environment.begin(db=environment.open_db(b"blocks")) as txn:
            assert pages.learn(txn)
            for _ in range(40):
                some = [dice.choice([*rows]) if dice.random() < 0.5 else name() for _ in range(50)]
                found = [record if record is None else record[:-4] for record in map(txn.get, some)]
                assert lookup.look_up(pages, "blocks", some) == found
                assert [lookup.look_up_block(pages, each, 0) for each in some] == found


@pytest.mark.parametrize("bases", [1, 3, 1000])
def test_leaves_are_found_for_uneven_positions(environment: lmdb.Environment, bases: int) -> None:
    dice = random.Random(bases)
    starts = [dice.randrange(1 << 46) & ~0xFFFFFF for _ in range(bases)] + [0, (1 << 46) - (1 << 24)]

    def name() -> bytes:
        position = dice.choice(starts) + dice.randrange(1 << 24)
        return position.to_bytes(6, "big") + dice.choice((b"", b"", b"\0\1", b"\0\2"))

    fill(environment, dice, 0)
    table = environment.open_db(b"keys")
    pages = pages_of(environment)
    for count in (50, 5_000, 60_000, 0):
        names = [name() for _ in range(count)]
        with environment.begin(db=table, write=True) as txn:
            txn.cursor().putmulti([(each, with_checksum(each)) for each in names])
            for each in dice.sample(names, count // 3):
                txn.delete(each)
        with environment.begin(db=table) as txn:
            assert pages.learn(txn)
            there = [*txn.cursor().iternext(values=False)]
            for _ in range(100):
                some = [dice.choice(there) if dice.random() < 0.5 else name() for _ in range(60)]
                found = [record if record is None else record[:-4] for record in map(txn.get, some)]
                assert lookup.look_up(pages, "keys", some) == found


def test_found_block_is_found_again_and_in_newer_version(
    environment: lmdb.Environment,
) -> None:
    dice = random.Random(7)
    # More than are held, so that some have the place of others.
    names = [number.to_bytes(8, "big") + each.to_bytes(8, "big") for number in range(40) for each in range(60)]
    fill(environment, dice, 0)
    pages, table = pages_of(environment), environment.open_db(b"blocks")
    for version in range(3):
        rows = {name: b"%d" % version * dice.choice((1, 50, 3_000)) for name in names if dice.random() < 0.7}
        with environment.begin(write=True) as txn:
            txn.drop(table, delete=False)
            for name, value in rows.items():
                txn.put(name, with_checksum(value), db=table)
        with environment.begin() as txn:
            assert pages.learn(txn)
            for moment in range(10):
                for name in dice.choices(names, k=1_000):
                    assert lookup.look_up_block(pages, name, moment) == rows.get(name)


def look_up_one(pages: Any, name: bytes, moment_ms: int) -> bytes | None:
    (found,) = lookup.look_up(pages, "keys", [name], moment_ms)
    return found


@pytest.mark.parametrize(
    ("table", "look_up", "name", "size"),
    [
        ("blocks", lookup.look_up_block, bytes(15) + b"1", 3_000),
        ("keys", look_up_one, bytes(6), 100),
        ("keys", look_up_one, bytes(6), 3_000),
    ],
)
def test_damage_to_found_record_is_noticed_a_millisecond_later(
    environment: lmdb.Environment, tmp_path: Path, table: str, look_up: Callable[..., Any], name: bytes, size: int
) -> None:
    dice = random.Random(8)
    value = dice.randbytes(size)
    fill(environment, dice, 0)
    with environment.begin(write=True, db=environment.open_db(table.encode())) as txn:
        txn.put(name, with_checksum(value))
    pages = pages_of(environment)
    with environment.begin() as txn:
        assert pages.learn(txn)
        assert look_up(pages, name, 1) == look_up(pages, name, 1) == value
        at = (tmp_path / "data.mdb").read_bytes().index(value) + 50
        with (tmp_path / "data.mdb").open("r+b") as file:
            file.seek(at)
            file.write(bytes([value[50] ^ 4]))
        for moment_ms in (2, 2, 0):  # whoever asks again in that millisecond is not answered either
            with pytest.raises(ValueError, match="damaged"):
                look_up(pages, name, moment_ms)


def test_long_record_is_compared_with_its_checksum_in_each_version(environment: lmdb.Environment) -> None:
    dice = random.Random(10)
    names = [each.to_bytes(6, "big") for each in range(300)]
    fill(environment, dice, 0)
    pages, table = pages_of(environment), environment.open_db(b"keys")
    for _ in range(5):
        rows = {name: dice.randbytes(dice.choice((3, 200, 900))) for name in names}
        with environment.begin(write=True) as txn:
            for name, value in rows.items():
                txn.put(name, with_checksum(value), db=table)
        with environment.begin() as txn:
            assert pages.learn(txn)
            for _ in range(20):
                some = dice.choices(names, k=60)
                assert lookup.look_up(pages, "keys", some, 1) == [rows[name] for name in some]


@given(st.binary(max_size=70), st.sampled_from([b"%b", b"{%b}", b"{}%b", b"a{%b}b", b"%b{", b"}%b{x"]))
def test_hashes_are_those_of_python(text: bytes, form: bytes) -> None:
    key = form % text
    assert lookup.hashes(key) == (slot_of(key), crc32(key), crc_hqx(key, 0))


def test_long_texts_of_any_size_and_address_have_pythons_checksum() -> None:
    text = random.Random(2).randbytes(700)
    for size in [*range(300), 511, 512, 513, 640, 699]:
        for start in (0, 1, len(text) - size):
            some = text[start : start + size]
            assert lookup.hashes(some)[1] == crc32(some)
    assert lookup.hashes(text * 100)[1] == crc32(text * 100)
    assert lookup.hashes(bytes(9_999))[1] == crc32(bytes(9_999))


FLIPS = """
import os, random, sys
import lmdb
import numpy as np
from state_backend.model.records import Change, Op, positions_in, runs_of
from state_backend.native import lookup, packing_of

folder, seed, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
(run,) = runs_of([Change("one", Op.PUT, b"%d" % number, None, b"v") for number in range(2_000)], ["one"])
order, tags = np.arange(run.num_rows), [np.zeros(1, np.int32)]
dice = random.Random(seed)
path = f"{folder}/data.mdb"
whole = open(path, "rb").read()
names = [bytes.fromhex(line) for line in open(f"{folder}/names").read().split()]
damaged = scanned = packed = 0
for _ in range(rounds):
    content = bytearray(whole)
    # Behind the meta pages, which LMDB itself reads.
    for _ in range(dice.choice((1, 8, 64))):
        page = 8192 + 4096 * dice.randrange((len(content) - 8192) // 4096)
        at = page + dice.choice((dice.randrange(64), dice.randrange(4096)))
        content[at] = dice.randrange(256)
    with open(path, "r+b") as file:
        file.write(content)
    environment = lmdb.open(folder, readonly=True, max_dbs=3, lock=False)
    for name in (b"keys", b"fields", b"blocks"):
        try:
            environment.open_db(name, create=False)
        except lmdb.Error:
            pass
    descriptor = os.open(path, os.O_RDONLY)
    try:
        pages = lookup.Pages(environment, descriptor)
        with environment.begin() as txn:
            if pages.learn(txn):
                for table in ("keys", "fields", "blocks"):
                    for at in range(0, len(names), 50):
                        try:
                            lookup.look_up(pages, table, names[at : at + 50])
                        except ValueError:
                            damaged += 1
                packing = packing_of([run], order, tags, pages, None, 100, 100, 9, False)
                while packing.begin(500, 0):
                    packed += sum(1 for _ in packing)
                start, end = 0, 1 << 48
                while step := pages.scan([(start, end)], 100, 1000, 1 << 20, 1, 1023, False):
                    scanned += len(step[1])
                    assert not step[0] or step[0] > start
                    if not step[0]:
                        break
                    start = step[0]
                damaged += step is None
    except lmdb.Error:
        pass
    os.close(descriptor)
    environment.close()
print("done", damaged, scanned, packed)
"""


def test_flipped_bytes_in_pages_end_in_error_or_record_never_in_crash(tmp_path: Path) -> None:
    dice = random.Random(3)
    with lmdb.open(str(tmp_path), map_size=1 << 30, max_dbs=len(TABLES), sync=False) as environment:
        held = fill(environment, dice, 1_500)
    names = [dice.choice(list(rows)) for rows in held.values() for _ in range(150)]
    (tmp_path / "names").write_text(" ".join(name.hex() for name in names))
    ended = subprocess.run(
        [sys.executable, "-c", FLIPS, str(tmp_path), "5", "60"], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    damaged, scanned, packed = map(int, ended.stdout.split()[1:])
    assert damaged > 0  # it was met, and told
    assert scanned > 10_000 and packed > 10_000


def test_learned_version_is_newest_until_transaction_is_committed(environment: lmdb.Environment) -> None:
    fill(environment, random.Random(1), 30)
    pages = pages_of(environment)
    assert not lookup.is_newest(pages)
    for round_ in range(4):  # the two meta pages are written in turns
        with environment.begin() as txn:
            pages.learn(txn)
        assert lookup.is_newest(pages)
        with environment.begin(write=True) as txn:
            txn.put(b"k", b"%d" % round_)
            assert lookup.is_newest(pages)
        assert not lookup.is_newest(pages)
