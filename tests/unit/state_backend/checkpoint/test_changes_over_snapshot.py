"""Whole states, against a dictionary: a snapshot and the files after it. The compiled core numbers keys as Python."""

from __future__ import annotations

from functools import partial

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from state_backend.checkpoint.changes_over_snapshot import merge_changes
from state_backend.checkpoint.key_numbers import KeyNumbers, key_numbers
from state_backend.checkpoint.records import Records, RecordType

Item = tuple[RecordType, bytes, bytes]
KEYS = st.integers(0, 9).map(lambda number: b"key %d" % number)
ITEMS = st.one_of(
    st.tuples(st.sampled_from((RecordType.PUT, RecordType.MERGE)), KEYS, st.binary(max_size=3)),
    st.tuples(st.just(RecordType.DELETE), KEYS, st.just(b"")),
)
BLOCKS = st.lists(st.lists(ITEMS, max_size=8), max_size=4)


@given(st.dictionaries(KEYS, st.binary(max_size=3)), st.lists(BLOCKS, max_size=4))
def test_whole_state_has_newest_value_of_each_key(snapshot: dict[bytes, bytes], files: list[list[list[Item]]]) -> None:
    expected = dict(snapshot)
    for op, key, value in (item for blocks in files for block in blocks for item in block):
        if op is RecordType.DELETE:
            expected.pop(key, None)
        else:
            expected[key] = expected.get(key, b"") + value if op is RecordType.MERGE else value
    base = [Records.of((RecordType.PUT, key, value) for key, value in snapshot.items())] if snapshot else []
    whole = merge_changes(base, [partial(map, Records.of, blocks) for blocks in files])
    found = [item for records in whole for item in records.items()]
    assert {op for op, _, _ in found} <= {RecordType.PUT}
    assert len(found) == len(expected)
    assert {key: value for _, key, value in found} == expected


@given(st.lists(st.lists(st.binary(max_size=20), max_size=30), max_size=6), st.lists(st.binary(max_size=20)))
def test_compiled_core_numbers_keys_as_python(added: list[list[bytes]], sought: list[bytes]) -> None:
    compiled, python = key_numbers(), KeyNumbers()
    for keys in added:
        assert compiled.added(*packed(keys)) == python.added(*packed(keys))
    assert len(compiled) == len(python) == len({key for keys in added for key in keys})
    assert compiled.found(*packed(sought)) == python.found(*packed(sought))


def test_compiled_core_numbers_many_keys() -> None:
    compiled = key_numbers()
    keys = [b"%d" % (number * number) + b"x" * (number % 50) for number in range(20_000)]
    for start in range(0, len(keys), 3000):
        compiled.added(*packed(keys[start : start + 3000]))
    assert np.frombuffer(compiled.found(*packed(keys)), np.int64).tolist() == list(range(len(keys)))


def packed(keys: list[bytes]) -> tuple[bytes, np.ndarray, np.ndarray]:
    """Return keys as a buffer, their places and their sizes."""
    records = Records.of((RecordType.PUT, key, b"") for key in keys)
    return records.content, records.keys, records.key_sizes
