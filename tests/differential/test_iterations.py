"""Whole iterations with SCAN, HSCAN, SSCAN and ZSCAN, whose steps every server may cut as it likes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compat.conformance import generators
from compat.conformance.dataset import Dataset
from compat.conformance.generators import checked
from compat.conformance.pair import Pair
from compat.conformance.servers import Running

steps = st.sampled_from([b"1", b"7", b"10", b"100", b"5000"])
HASHES = [b"hash:large", b"hash:edge", b"hash:wide", b"hash:odd", b"hash:later", b"missing"]
SETS = [b"set:large", b"set:edge", b"set:odd", b"set:numbers", b"set:later"]
SORTED_SETS = [b"zset:large", b"zset:edge", b"zset:same", b"zset:texts", b"zset:later"]


def iterate(server: Running, command: list[bytes], options: list[bytes]) -> Counter[bytes]:
    """Follow the cursor to its end and return what came, and how often."""
    found: Counter[bytes] = Counter()
    cursor = b"0"
    with server.connect() as connection:
        while True:
            next_cursor, items = connection.call(*command, cursor, *options).value
            found.update(item.raw for item in items.value)
            cursor = next_cursor.value
            if cursor == b"0":
                return found


@given(
    pattern=generators.patterns,
    type_name=st.sampled_from([None, b"string", b"HASH", b"list", b"set", b"ZSET"]),
    count=steps,
)
@checked(20)
def test_scan_finds_same_keys(pair: Pair, pattern: bytes, type_name: bytes | None, count: bytes) -> None:
    options = [b"MATCH", pattern, b"COUNT", count, *([] if type_name is None else [b"TYPE", type_name])]
    theirs, ours = (iterate(server, [b"SCAN"], options) for server in (pair.redis, pair.sparkis))
    assert ours.keys() == theirs.keys()
    assert not ours or max(ours.values()) == 1


@pytest.mark.parametrize("key", [*HASHES, *SETS, *SORTED_SETS], ids=bytes.decode)
@given(pattern=generators.patterns, count=steps)
@checked(6)
def test_scan_of_key_finds_same_items(pair: Pair, key: bytes, pattern: bytes, count: bytes) -> None:
    name = {b"h": b"HSCAN", b"s": b"SSCAN", b"z": b"ZSCAN", b"m": b"HSCAN"}[key[:1]]
    options = [b"MATCH", pattern, b"COUNT", count]
    theirs, ours = (iterate(server, [name, key], options) for server in (pair.redis, pair.sparkis))
    assert ours.keys() == theirs.keys()


@given(pattern=generators.patterns)
@checked(75)
def test_patterns_match_same_keys(pair: Pair, pattern: bytes) -> None:
    pair.check([[b"KEYS", pattern]])


def test_scan_of_another_database_finds_nothing(pair: Pair) -> None:
    pair.check([[b"SELECT", b"1"], [b"SCAN", b"0"], [b"DBSIZE"], [b"KEYS", b"*"], [b"GET", b"plain"], [b"RANDOMKEY"]])


def test_random_key_is_any_of_keys(pair: Pair, dataset: Dataset) -> None:
    replies = pair.replies_to([[b"RANDOMKEY"]] * 200)[1]
    found = {reply.value for reply in replies}
    assert found <= set(dataset.keys)
    assert len(found) > 50
