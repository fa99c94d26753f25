"""Values of a reducing state follow the arithmetic of their column, to the last digit."""

from __future__ import annotations

import json
import math
from functools import reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from state_backend.apply.replay import read_snapshot
from state_backend.codec.reductions import float_text, reduction_of
from state_backend.codec.row_encoding import as_bytes
from state_backend.log.change_log import ChangeLog
from state_backend.log.checked_json import checked_object, with_checksum
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import ChangeError, DescriptorError, NewerFormatError
from state_backend.model.records import Change, Op


def state(how: str, kind: str, **others: Any) -> StateDescriptor:
    return StateDescriptor("s", "k", "v", reduce=how, columns={"v": kind}, **others)


def fold(how: str, kind: str, *texts: bytes) -> bytes:
    reduction = reduction_of(state(how, kind))
    assert reduction is not None
    return reduce(reduction.fold, texts)


@settings(deadline=None)
@given(st.lists(st.integers(-(10**30), 10**30), min_size=1))
def test_integers_of_any_size_are_added(numbers: list[int]) -> None:
    assert int(fold("sum", "bigint", *(b"%d" % number for number in numbers))) == sum(numbers)


@settings(deadline=None)
@given(st.lists(st.integers(-(10**38), 10**38), min_size=1))
def test_decimals_are_added_exactly_and_keep_their_scale(units: list[int]) -> None:
    def text(unit: int) -> bytes:
        return b"-" * (unit < 0) + b"%d.%04d" % divmod(abs(unit), 10_000)

    assert fold("sum", "decimal(38,4)", *map(text, units)) == text(sum(units))


@settings(deadline=None)
@given(st.floats())
def test_float_has_text_that_sink_gives_it(number: float) -> None:
    assert float_text(number) == as_bytes(pa.array([number]), "float")[0].as_py()


@settings(deadline=None)
@given(st.lists(st.floats(), min_size=1))
def test_nan_is_largest_float_and_others_compare_as_numbers(numbers: list[float]) -> None:
    texts = [float_text(number) for number in numbers]
    real = [number for number in numbers if not math.isnan(number)]
    assert float(fold("min", "double", *texts)) == pytest.approx(min(real, default=math.nan), nan_ok=True, rel=0)
    greatest = max(numbers) if len(real) == len(numbers) else math.nan
    assert float(fold("max", "double", *texts)) == pytest.approx(greatest, nan_ok=True, rel=0)


@settings(deadline=None)
@given(st.lists(st.text(), min_size=1))
def test_texts_are_compared_by_code_points(texts: list[str]) -> None:
    encoded = [text.encode("utf-8", "replace") for text in texts]
    assert fold("min", "string collate UTF8_LCASE", *encoded) == min(encoded)
    assert fold("max", "string", *encoded) == max(encoded)


@pytest.mark.parametrize(
    ("kind", "ordered"),
    [
        ("timestamp", ["-0001-12-31T00:00:00Z", "0999-01-01T00:00:00Z", "2013-07-04T10:00:00Z"]),
        ("timestamp", ["2013-07-04T10:00:00Z", "2013-07-04T10:00:00.5Z", "2013-07-04T10:00:01Z"]),
        ("timestamp_ntz", ["2013-07-04T10:00:00", "2013-07-04T10:00:00.000001", "10000-01-01T00:00:00"]),
        ("date", ["-0001-12-31", "0001-01-01", "9999-12-31", "+10000-01-01"]),
        ("boolean", ["false", "true"]),
        ("decimal(10,2)", ["-10.00", "-9.50", "0.00", "9.50", "10.00"]),
        ("int", ["-10", "-9", "0", "9", "10"]),
    ],
)
def test_min_and_max_compare_parsed_values(kind: str, ordered: list[str]) -> None:
    texts = [text.encode() for text in ordered]
    for order in (texts, texts[::-1]):
        assert fold("min", kind, *order) == texts[0]
        assert fold("max", kind, *order) == texts[-1]


@pytest.mark.parametrize("kind", ["string", "boolean", "timestamp", "date", "binary", "array<int>"])
def test_sum_of_text_is_refused_by_name(kind: str) -> None:
    with pytest.raises(DescriptorError, match=r"state 's': reduce='sum' cannot take the column 'v'.*cast the column"):
        reduction_of(state("sum", kind))


def test_nested_types_have_no_least_and_count_takes_any() -> None:
    with pytest.raises(DescriptorError, match="reduce='min' cannot take"):
        reduction_of(state("min", "struct<a:int>"))
    assert reduction_of(state("count", "struct<a:int>")) == reduction_of(state("sum", "int"))


def test_log_writer_folds_and_refuses_values_without_reduction(tmp_path: Path) -> None:
    states = [state("sum", "bigint"), StateDescriptor("plain", "k", "v")]
    with LogWriter(tmp_path, "job", states) as writer:
        writer.publish([Change("s", Op.FOLD, b"job:s:a", value=b"5"), Change("s", Op.FOLD, b"job:s:a", value=b"-7")])
        writer.publish([Change("s", Op.FOLD, b"job:s:a", value=b"%d" % 2**80)])
        for wrong in (
            Change("s", Op.FOLD, b"job:s:a", value=b"1.5"),
            Change("s", Op.PUT, b"job:s:a", value=b" 5"),
            Change("s", Op.FOLD, b"job:s:a", b"field", value=b"5"),
            Change("s", Op.FOLD, b"job:s:a"),
            Change("plain", Op.FOLD, b"job:plain:a", value=b"5"),
        ):
            with pytest.raises(ChangeError, match=f"state '{wrong.state}'"):
                writer.publish([wrong])
    with read_snapshot(tmp_path, "job") as shown:
        assert shown.value(b"job:s:a") == b"%d" % (2**80 - 2)


def test_reduction_needs_type_and_cannot_change(tmp_path: Path) -> None:
    with pytest.raises(DescriptorError, match=r"needs the type of the column 'v': columns=\{'v': 'bigint'\}"):
        LogWriter(tmp_path, "job", [StateDescriptor("s", "k", "v", reduce="max")])
    LogWriter(tmp_path, "job", [state("sum", "int")], "query").close()
    LogWriter(tmp_path, "job", [state("sum", "bigint")], "query").close()
    for other in (state("max", "bigint"), state("sum", "double"), StateDescriptor("s", "k", "v")):
        with pytest.raises(DescriptorError, match="its reduction was reduce='sum' of bigint in this log and is now"):
            LogWriter(tmp_path, "job", [other], "query")


def test_only_log_with_reducing_state_has_newer_format(tmp_path: Path) -> None:
    """So that a version that does not know how to fold refuses it, and reads all others."""
    for job, how, number in (("plain", None, 1), ("last", "last", 1), ("sums", "sum", 2)):
        described = StateDescriptor(
            "s", "k", "v", reduce=how, columns={"v": "int"}, order_by="t" if how == "last" else ()
        )
        with LogWriter(tmp_path, job, [described]) as writer:
            writer.publish([])
        generation = tmp_path / job / writer.generation
        assert json.loads((generation.parent / "terms" / "1.json").read_text())["format"] == number
        assert json.loads((generation / "epochs" / "0.json").read_text())["format"] == number
    path = generation.parent / "terms" / "1.json"
    path.write_bytes(with_checksum(checked_object(path.read_bytes()) | {"format": 5}))
    with pytest.raises(NewerFormatError, match=r"format 5, which sparkis .* wrote; .* reads up to format 4: "):
        ChangeLog(tmp_path).job("sums").description(writer.generation)
