"""Strategies for the types and the values of rows."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

SMALL, LARGE = pa.decimal128(10, 2), pa.decimal128(38, 3)
LEAVES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-128, 127),
    pa.int16(): st.integers(-(1 << 15), (1 << 15) - 1),
    pa.int32(): st.integers(-(1 << 31), (1 << 31) - 1),
    pa.int64(): st.integers(-(1 << 63), (1 << 63) - 1),
    pa.float32(): st.floats(width=32, allow_nan=False),
    pa.float64(): st.floats(allow_nan=False),
    pa.string(): st.text(),
    pa.binary(): st.binary(),
    SMALL: st.decimals(-(10**7), 10**7, places=2),
    LARGE: st.integers(-(10**30), 10**30).map(lambda number: Decimal(number).scaleb(-3)),
}


def struct_of(kinds: list[pa.DataType]) -> pa.StructType:
    return pa.struct([(f"f{index}", kind) for index, kind in enumerate(kinds)])


def values_of(kind: pa.DataType, *, nullable: bool = True) -> st.SearchStrategy[Any]:
    if pa.types.is_struct(kind):
        found: st.SearchStrategy[Any] = st.tuples(*(values_of(field.type) for field in kind))
    elif pa.types.is_list(kind):
        found = st.lists(values_of(kind.value_type), max_size=4)
    elif pa.types.is_map(kind):
        found = st.dictionaries(values_of(kind.key_type, nullable=False), values_of(kind.item_type), max_size=3)
    else:
        found = LEAVES[kind]
    return st.none() | found if nullable else found
