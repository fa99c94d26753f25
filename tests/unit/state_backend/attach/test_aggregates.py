"""Aggregate functions find their buffers only where there is no other place for them, and their results are Spark's."""

from __future__ import annotations

import pickle
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from state_backend.attach.aggregates import (
    PlannedFunction,
    hint_of,
    match_buffers,
    parse_aggregate,
    planned_of,
    results_of,
)
from state_backend.attach.distinct_counts import distinct_counts, precision_of
from state_backend.attach.evaluation import FunctionCall, mean, total
from state_backend.model.errors import DescriptorError


def fields(names: str) -> list[pa.Field]:
    kinds = {"count": pa.int64(), "isEmpty": pa.bool_(), "buf": pa.binary(), "valueSet": pa.bool_()}
    return [pa.field(name, kinds.get(name, pa.float64())) for name in names.split()]


def places(texts: list[str], names: str) -> list[tuple[int, int]]:
    calls = {text: call for text in texts if (call := parse_aggregate(text)) is not None}
    return [(each.first, each.width) for each in match_buffers(calls, fields(names), "operator 0").values()]


@pytest.mark.parametrize(
    ("texts", "names", "expected"),
    [
        (["avg(price)"], "count sum count", [(1, 2)]),
        (["count(*)", "avg(price)"], "count sum count", [(0, 1), (1, 2)]),
        (["avg(a)", "avg(b)", "sum(c)"], "sum count sum count sum isEmpty", [(0, 2), (2, 2), (4, 2)]),
        (["stddev(a)"], "n avg m2 n avg m2 m3 m4", [(0, 3)]),
        (["covar_pop(a, b)"], "n xAvg yAvg ck xMk yMk n xAvg yAvg ck", [(6, 4)]),
        (["approx_count_distinct(a)", "max(b)"], "MS[0] MS[1] max", [(0, 2), (2, 1)]),
        (["max(a)", "max(a)"], "max", [(0, 1)]),
    ],
)
def test_function_has_only_place_that_fits(texts: list[str], names: str, expected: list[tuple[int, int]]):
    assert places(texts, names) == expected


@pytest.mark.parametrize(
    ("texts", "names", "error"),
    [
        (["avg(a)"], "sum count sum count", "from _0 or from _2 on; give all functions"),
        (["count(*)"], "count sum count", "from _0 or from _2 on; give all functions"),
        (["avg(a)", "max(b)"], "max sum count", "no buffers for it; give the functions in the order of the query"),
        (["stddev(a)"], "n avg m2 m3", "no buffers for it"),
    ],
)
def test_function_with_several_places_or_none_is_refused(texts: list[str], names: str, error: str):
    with pytest.raises(DescriptorError, match=error):
        places(texts, names)


@pytest.mark.parametrize("text", ["sum / count", "lower(k)", "(count(a)) + (b)", "count(a) + sum(b)", "price"])
def test_other_expressions_are_no_calls_of_aggregate_functions(text: str):
    assert parse_aggregate(text) is None


@pytest.mark.parametrize(
    ("text", "error"), [("mode(a)", "order in Spark's memory"), ("collect_set(a::strin)", "is no type of Spark")]
)
def test_function_that_cannot_be_finished_is_refused_with_reason(text: str, error: str):
    with pytest.raises(DescriptorError, match=error):
        parse_aggregate(text)


def test_bytes_need_type_of_their_values():
    found = match_buffers({"collect_set(a)": FunctionCall("collect_set")}, fields("buf"), "operator 0")[
        "collect_set(a)"
    ]
    with pytest.raises(DescriptorError, match=r"needs the type of its argument, as in collect_set\(tag::string\)"):
        found.evaluate([pa.nulls(0, pa.binary())])


def test_evident_functions_need_no_name():
    assert {
        name: each.first for name, each in results_of(fields("max first valueSet sum isEmpty"), None, ()).items()
    } == {
        "first": 1,
        "sum": 3,
    }
    assert "avg" in str(hint_of(fields("max sum count"), ()))
    assert hint_of(fields("max count first valueSet"), ()) is None


def test_functions_of_plan_that_do_not_fit_are_left_alone(caplog: pytest.LogCaptureFixture):
    functions = [PlannedFunction("mean", "avg(price)", 0)]
    assert planned_of({3: fields("sum count")}, [functions]) == {3: functions}
    assert planned_of({3: fields("count")}, [functions]) == {}
    assert planned_of({3: fields("count"), 4: fields("count")}, [functions]) == {}
    assert "are served as they are" in caplog.text


def test_result_survives_way_to_another_process():
    (found,) = match_buffers({"avg(a)": FunctionCall("avg")}, fields("sum count"), "operator 0").values()
    sums, counts = pa.array([3.0, 1.0], pa.float64()), pa.array([2, 0], pa.int64())
    assert pickle.loads(pickle.dumps(found)).evaluate([sums, counts]).to_pylist() == [1.5, None]


def decimals(texts: list[str | None], precision: int, scale: int) -> pa.Array:
    return pa.array([None if each is None else Decimal(each) for each in texts], pa.decimal128(precision, scale))


def test_averages_of_decimals_have_four_digits_more_and_are_rounded_half_up():
    sums = decimals(["1.00", "-2.00", "0.01", None], 20, 2)
    found = mean([sums, pa.array([3, 3, 8, 1], pa.int64())], FunctionCall("avg"))
    assert found.type == pa.decimal128(14, 6)
    assert [None if each is None else str(each) for each in found.to_pylist()] == [
        "0.333333",
        "-0.666667",
        "0.001250",
        None,
    ]


def test_small_decimals_are_kept_as_integers_and_floats():
    kind = pa.decimal128(7, 2)
    found = total([pa.array([12345, None, -1], pa.int64())], FunctionCall("sum", kind))
    assert found.equals(decimals(["123.45", None, "-0.01"], 17, 2))
    found = mean([pa.array([1.0, 0.0], pa.float64()), pa.array([3, 0], pa.int64())], FunctionCall("avg", kind))
    assert found.equals(decimals(["0.003333", None], 11, 6))


def registers(values: list[int]) -> Any:
    """Return the buffers of registers: ten of six bits in each."""
    words = [0] * (len(values) // 10 + 1)
    for index, value in enumerate(values):
        words[index // 10] |= value << index % 10 * 6
    return np.array([words], np.int64)


# Made by Spark's HyperLogLogPlusPlusHelper from the same registers.
COUNTS = [
    ([0] * 512, 0),
    ([1] + [0] * 511, 1),
    ([index % 3 for index in range(512)], 561),
    ([1 + index % 4 for index in range(512)], 1560),
    ([2 + index % 7 for index in range(512)], 5174),
    ([6 + index % 9 for index in range(512)], 106140),
    ([3 + index % 2 for index in range(16)], 115),
]


@pytest.mark.parametrize(("values", "count"), COUNTS, ids=range(len(COUNTS)))
def test_distinct_counts_are_those_of_spark(values: list[int], count: int):
    assert distinct_counts(registers(values)).tolist() == [count]


def test_number_of_buffers_determines_precision():
    assert (precision_of(52), precision_of(2), precision_of(51)) == (9, 4, None)
