"""The difference of two whole states, in any blocks, leads from one to the other, and has each key once."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from state_backend.checkpoint.difference import difference
from state_backend.checkpoint.records import Records, RecordType

STATES = st.dictionaries(st.binary(max_size=2), st.binary(max_size=1))
SIZES = st.integers(1, 4)


@given(STATES, STATES, SIZES, SIZES)
def test_difference_leads_from_one_state_to_other(
    older: dict[bytes, bytes], newer: dict[bytes, bytes], size: int, other_size: int
) -> None:
    found = dict(older)
    items = [each for block in difference(blocks(older, size), blocks(newer, other_size)) for each in block.items()]
    for op, key, value in items:
        assert older.get(key) != newer.get(key)
        if op is RecordType.DELETE:
            del found[key]
        else:
            found[key] = value
    assert found == newer
    assert len({key for _, key, _ in items}) == len(items)


def blocks(state: dict[bytes, bytes], size: int) -> Iterator[Records]:
    items = [(RecordType.PUT, key, value) for key, value in sorted(state.items())]
    return (Records.of(items[start : start + size]) for start in range(0, len(items), size))
