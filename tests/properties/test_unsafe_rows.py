"""Spark's rows: every row of every schema is read back; damaged bytes are an error or other values, never a crash."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compat.examples import examples
from state_backend.checkpoint.unsafe_rows import decode_rows
from state_backend.model.errors import CheckpointFormatError
from tests.golden_checkpoints import plain
from tests.properties.rows import LEAVES, struct_of, values_of
from tests.unsafe_rows import unsafe_row

MAP_KEYS = (pa.int64(), pa.string())


def nested(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(struct_of),
        inner.map(pa.list_),
        st.tuples(st.sampled_from(MAP_KEYS), inner).map(lambda pair: pa.map_(*pair)),
    )


TYPES = st.recursive(st.sampled_from(list(LEAVES)), nested, max_leaves=6)
SCHEMAS = st.one_of(
    st.lists(TYPES, min_size=1, max_size=5).map(struct_of),
    st.integers(60, 130).map(lambda count: struct_of([pa.int64()] * count)),
)


ROWS = SCHEMAS.flatmap(
    lambda schema: st.tuples(st.just(schema), st.lists(values_of(schema, nullable=False), min_size=1, max_size=5))
)


def encoded(rows: list[Any], schema: pa.StructType) -> tuple[bytes, Any, Any]:
    """Return rows in one buffer, between other bytes, with their positions and sizes."""
    content, starts, sizes = b"\xff", [], []
    for row in rows:
        written = unsafe_row(row, schema)
        starts.append(len(content))
        sizes.append(len(written))
        content += written + b"\xff" * 3
    return content, np.array(starts, np.int64), np.array(sizes, np.int64)


@settings(max_examples=examples(50))
@given(ROWS)
def test_rows_are_read_back(given_rows: tuple[pa.StructType, list[Any]]) -> None:
    schema, rows = given_rows
    assert plain(decode_rows(*encoded(rows, schema), schema, "5.delta")) == rows


@settings(max_examples=examples(20))
@given(ROWS, st.data())
def test_damaged_rows_are_errors_or_differ(given_rows: tuple[pa.StructType, list[Any]], data: st.DataObject) -> None:
    schema, rows = given_rows
    content, starts, sizes = encoded(rows, schema)
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    try:
        found = decode_rows(bytes(damaged), starts, sizes, schema, "5.delta")
    except CheckpointFormatError as error:
        assert "5.delta cannot be read" in str(error)
    else:
        assert len(found) == len(rows)
        assert found.nbytes <= 64 * len(content) + 10_000


@settings(max_examples=examples(20))
@given(ROWS, st.integers(0, 1000))
def test_rows_shorter_than_their_fields_are_error(given_rows: tuple[pa.StructType, list[Any]], size: int) -> None:
    schema, rows = given_rows
    content, starts, _ = encoded(rows[:1], schema)
    size %= (schema.num_fields + 63) // 64 * 8 + 8 * schema.num_fields
    with pytest.raises(CheckpointFormatError):
        decode_rows(content, starts, np.array([size]), schema, "5.delta")
