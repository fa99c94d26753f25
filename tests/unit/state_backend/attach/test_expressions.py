"""Expressions over columns have Spark's results, and what is not computed is refused."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from state_backend.attach.expressions import parse
from state_backend.model.errors import DescriptorError

COLUMNS = {
    "n": pa.array([1, None, -4], pa.int64()),
    "v": pa.array([2.0, 0.0, None], pa.float64()),
    "k": pa.array(["a", None, "É"], pa.string()),
    "price": pa.array([None, None, None], pa.decimal128(9, 2)),
}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("n + 2 * 3", [7, None, 2]),
        ("-(n - 1)", [0, None, 5]),
        ("n / v", [0.5, None, None]),
        ("1 / v", [0.5, None, None]),
        ("coalesce(k, 'it''s none')", ["a", "it's none", "É"]),
        ("concat(k, '-', n)", ["a-1", None, "É--4"]),
        ("concat_ws('-', k, n)", ["a-1", "", "É--4"]),
        ("lower(`k`)", ["a", None, "é"]),
        ("abs(cast(n AS int))", [1, None, 4]),
        ("cast(v * 1.5 AS bigint)", [3, 0, None]),
        ("cast(price AS double)", [None, None, None]),
    ],
)
def test_results(text: str, values: list[Any]):
    expression = parse(text)
    assert expression.values(COLUMNS, 3).to_pylist() == values
    assert (
        expression.kind({name: column.type for name, column in COLUMNS.items()}) == expression.values(COLUMNS, 3).type
    )


@pytest.mark.parametrize("text", ["", "n +", "sqrt(n)", "n; drop", "n % 2", "cast(n AS date2)", "(n", "n n", "'open"])
def test_what_is_no_expression_is_refused(text: str):
    with pytest.raises(DescriptorError, match="--reader spark"):
        parse(text)


@pytest.mark.parametrize("text", ["k + 1", "price * 2", "concat(k, v)", "coalesce(k, n)", "cast(k AS int)"])
def test_types_that_do_not_fit_are_refused(text: str):
    with pytest.raises(DescriptorError, match="cannot compute"):
        parse(text).kind({name: column.type for name, column in COLUMNS.items()})
