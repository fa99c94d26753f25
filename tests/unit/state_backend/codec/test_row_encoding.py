"""Rows become change records: what a client will see, and which rows are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from state_backend.codec import packed_list, packed_map
from state_backend.codec import row_encoding as encoding
from state_backend.codec.row_encoding import RowError, RowPlan, as_bytes, encode, pack_columns
from state_backend.model.descriptor import Kind
from state_backend.model.records import (
    KEY_BYTES_MAX,
    RUN_BYTES_MAX,
    RUN_ROWS_MAX,
    VALUE_BYTES_MAX,
    Change,
    Op,
    changes_in,
    schema,
)
from tests.builders import put_field, put_value

VALUES = RowPlan(
    state="temp",
    literals=("job:temp:", ""),
    key_names=("sensor",),
    key_forms=("text",),
    key_is_open=(False,),
    field_name=None,
    field_form="text",
    value_names=("temp",),
    value_forms=("text",),
    map_fields=(),
    expire_at_ms=None,
    keeps_last=False,
)
FIELDS = replace(VALUES, field_name="day")
WHOLE_MAPS = replace(VALUES, value_forms=("text", "text"), map_fields=("a", "b"))
SET = replace(VALUES, field_name="player", value_names=(), value_forms=(), kind=Kind.SET)
SORTED_SET = replace(SET, value_names=("points",), value_forms=("float",), kind=Kind.SORTED_SET)
PAIRS = replace(
    VALUES, literals=("job:temp:", ":", ""), key_names=("x", "y"), key_forms=("text", "text"), key_is_open=(True, False)
)


def rows(**columns: Sequence[Any]) -> pa.RecordBatch:
    """Return rows as the sink selects them; `h`, their hashes, are their numbers from 1 unless given."""
    n = len(next(iter(columns.values())))
    columns.setdefault("h", range(1, n + 1))
    types = {"h": pa.int64(), "d": pa.bool_(), "e": pa.int64(), "r": pa.bool_()}
    return pa.RecordBatch.from_pydict(
        {
            name: value if isinstance(value, pa.Array) else pa.array(value, types.get(name, pa.string()))
            for name, value in columns.items()
        }
    )


def changes(plan: RowPlan, *batches: pa.RecordBatch) -> list[Change]:
    """Return what the rows become, in key order."""
    return sorted(
        (change for run in encode([plan], batches, [0]) for change in changes_in(run)),
        key=lambda c: (c.key, c.field or b""),
    )


put = partial(put_value, "temp")
put_item = partial(put_field, "temp")


def delete(key: bytes, field: bytes | None = None) -> Change:
    return Change("temp", Op.DELETE, key, field)


# What a row becomes ---------------------------------------------------------------------------------------------------


def test_row_puts_its_value_at_its_key():
    assert changes(VALUES, rows(k0=["a", "b"], v0=["1", ""])) == [put(b"job:temp:a", b"1"), put(b"job:temp:b", b"")]


def test_null_value_deletes():
    assert changes(VALUES, rows(k0=["a"], v0=[None])) == [delete(b"job:temp:a")]


def test_true_deletion_column_deletes_and_null_does_not():
    batch = rows(k0=["a", "b", "c"], v0=["1", "2", "3"], d=[True, False, None])
    assert changes(VALUES, batch) == [delete(b"job:temp:a"), put(b"job:temp:b", b"2"), put(b"job:temp:c", b"3")]


def test_change_with_field_is_about_that_field():
    batch = rows(k0=["a", "a"], f=["mon", "tue"], v0=["1", None])
    assert changes(FIELDS, batch) == [put_item(b"job:temp:a", b"mon", b"1"), delete(b"job:temp:a", b"tue")]


def test_put_carries_its_expiry_and_delete_has_none():
    plan = replace(VALUES, expire_at_ms=1234)
    expected = [put(b"job:temp:a", b"1", expire_at_ms=1234), delete(b"job:temp:b")]
    assert changes(plan, rows(k0=["a", "b"], v0=["1", None])) == expected


def test_row_adds_member_and_removes_it_if_deletion_column_is_true():
    batch = rows(k0=["a", "a"], f=["x", "y"], d=[None, True])
    assert changes(SET, batch) == [put_item(b"job:temp:a", b"x", b""), delete(b"job:temp:a", b"y")]


def test_score_is_put_at_its_member_and_null_one_removes_it():
    batch = rows(k0=["a"] * 4, f=["w", "x", "y", "z"], v0=pa.array([1.0, 0.1, None, float("-inf")]))
    expected = [
        put_item(b"job:temp:a", b"w", b"1"),
        put_item(b"job:temp:a", b"x", b"0.1"),
        delete(b"job:temp:a", b"y"),
    ]
    assert changes(SORTED_SET, batch) == [*expected, put_item(b"job:temp:a", b"z", b"-inf")]


def test_score_that_is_no_number_fails_batch_and_names_key():
    batch = rows(k0=["a", "b"], f=["x", "y"], v0=pa.array([1.0, float("nan")]))
    message = r"state 'temp': the score column 'points' is NaN in a row of the key b'job:temp:b'"
    with pytest.raises(RowError, match=message):
        changes(SORTED_SET, batch)


def test_member_is_never_null():
    with pytest.raises(RowError, match="state 'temp': the member column 'player' is null in 1 row"):
        changes(SET, rows(k0=["a"], f=[None]))


def test_two_rows_of_one_member_need_order():
    batch = rows(k0=["a", "a"], f=["x", "x"], v0=pa.array([1.0, 2.0]))
    with pytest.raises(RowError, match="several rows for the key b'job:temp:a'"):
        changes(SORTED_SET, batch)
    assert changes(replace(SORTED_SET, keeps_last=True), batch) == [put_item(b"job:temp:a", b"x", b"2")]


def test_several_value_columns_are_one_map_without_nulls():
    (change,) = changes(WHOLE_MAPS, rows(k0=["k"], v0=["1"], v1=[None]))
    assert change.value is not None
    assert list(packed_map.pairs(change.value)) == [(b"a", b"1")]


def test_map_of_nulls_only_deletes_key():
    assert changes(WHOLE_MAPS, rows(k0=["k"], v0=[None], v1=[None])) == [delete(b"job:temp:k")]


def test_key_parts_and_literals_make_key_in_their_order():
    plan = replace(PAIRS, literals=("plane/", "->", "!"))
    assert [change.key for change in changes(plan, rows(k0=["JFK"], k1=["LAX"], v0=["1"]))] == [b"plane/JFK->LAX!"]


def test_negative_zero_is_zero_in_key_and_unchanged_in_value():
    plan = replace(FIELDS, key_forms=("float",), field_form="float", value_forms=("float",))
    zero = pa.array([-0.0])
    assert changes(plan, rows(k0=zero, f=zero, v0=zero)) == [put_item(b"job:temp:0", b"0", b"-0")]


def test_no_rows_are_no_runs():
    assert list(encode([VALUES], [], [0])) == []
    assert list(encode([VALUES], [rows(k0=[], v0=[])], [0])) == []


# Several rows of one key ----------------------------------------------------------------------------------------------


def test_last_row_of_key_wins():
    plan = replace(VALUES, keeps_last=True)
    batch = rows(k0=["a", "a", "a", "b"], v0=["1", "2", "3", "4"])
    assert changes(plan, batch) == [put(b"job:temp:a", b"3"), put(b"job:temp:b", b"4")]


def test_last_row_of_key_wins_across_borders_of_batches():
    plan = replace(VALUES, keeps_last=True)
    batches = [
        rows(k0=["a", "b"], v0=["1", "1"]),
        rows(k0=["b"], v0=["2"]),
        rows(k0=[], v0=[]),
        rows(k0=["b", "c"], v0=["3", "1"]),
        rows(k0=["c"], v0=[None]),
    ]
    assert changes(plan, *batches) == [put(b"job:temp:a", b"1"), put(b"job:temp:b", b"3"), delete(b"job:temp:c")]


def test_last_of_scattered_rows_of_key_wins():
    plan = replace(VALUES, keeps_last=True)
    batches = [rows(k0=["a", "b", "a"], v0=["1", "2", "3"]), rows(k0=["b", "c"], v0=["4", "5"])]
    found = changes(plan, *batches)
    assert sorted(found) == [put(b"job:temp:a", b"3"), put(b"job:temp:b", b"4"), put(b"job:temp:c", b"5")]


def test_last_row_of_field_wins_and_other_fields_stay():
    plan = replace(FIELDS, keeps_last=True)
    batches = [rows(k0=["a", "a"], f=["x", "x"], v0=["1", "2"]), rows(k0=["a", "a"], f=["x", "y"], v0=["3", "4"])]
    assert changes(plan, *batches) == [
        put_item(b"job:temp:a", b"x", b"3"),
        put_item(b"job:temp:a", b"y", b"4"),
    ]


@pytest.mark.parametrize("cut", [0, 1])
def test_two_rows_of_one_key_are_refused_by_name(cut: int):
    batch = rows(k0=["a", "a"], v0=["1", "2"])
    with pytest.raises(RowError, match=r"state 'temp'.*several rows for the key b'job:temp:a'.*order_by"):
        changes(VALUES, batch.slice(0, cut), batch.slice(cut))


def test_two_rows_of_one_key_and_field_are_refused():
    assert len(changes(FIELDS, rows(k0=["a", "a"], f=["x", "y"], v0=["1", "2"]))) == 2
    with pytest.raises(RowError, match="several rows for the key"):
        changes(FIELDS, rows(k0=["a", "a"], f=["x", "x"], v0=["1", "2"]))


def test_all_rows_that_append_to_list_count_in_their_order():
    plan = replace(VALUES, keeps_last=True, appends=True)
    batches = [rows(k0=["a", "a"], v0=["1", "2"]), rows(k0=["a", "b"], v0=["1", "3"]), rows(k0=["b"], v0=[None])]
    found = [(change.op, change.key[-1:], change.value) for change in changes(plan, *batches)]
    appended = [(Op.APPEND, key, value) for key, value in ((b"a", b"1"), (b"a", b"2"), (b"a", b"1"), (b"b", b"3"))]
    assert found == [*appended, (Op.DELETE, b"b", None)]


def test_rows_that_append_to_one_list_need_order():
    with pytest.raises(RowError, match=r"several rows for the key b'job:temp:a'.*order_by"):
        changes(replace(VALUES, appends=True), rows(k0=["a", "a"], v0=["1", "2"]))


def test_array_replaces_list_and_must_not_contain_null():
    plan = replace(VALUES, replaces_list=True)
    arrays = pa.array([["x", ""], [], None], pa.list_(pa.string()))
    full, *others = changes(plan, rows(k0=["a", "b", "c"], v0=arrays))
    assert full.value is not None
    assert packed_list.elements(full.value) == [b"x", b""]
    assert others == [delete(b"job:temp:b"), delete(b"job:temp:c")]
    with pytest.raises(RowError, match=r"state 'temp': 1 element\(s\) of an array are null.*array_compact"):
        changes(plan, rows(k0=["a"], v0=pa.array([["x", None]])))


# What is refused ------------------------------------------------------------------------------------------------------


def test_null_key_is_refused_by_state_and_column():
    with pytest.raises(RowError, match=r"state 'temp'.*key column 'sensor' is null in 1 row"):
        changes(VALUES, rows(k0=["a", None], v0=["1", "2"]))


def test_null_field_is_refused_by_state_and_column():
    with pytest.raises(RowError, match=r"state 'temp'.*field column 'day' is null in 1 row"):
        changes(FIELDS, rows(k0=["a"], f=[None], v0=["1"]))


@pytest.mark.parametrize("part", ["a:b", ":", "a:"])
def test_key_part_with_separator_is_refused(part: str):
    with pytest.raises(RowError, match=r"state 'temp'.*key column 'x' has the value .*separator"):
        changes(PAIRS, rows(k0=["fine", part], k1=["b", "c"], v0=["1", "2"]))


@pytest.mark.parametrize(("part", "separator", "is_refused"), [("a-", "--", True), ("-a", "--", False)])
def test_key_part_that_ends_like_separator_begins_is_refused(part: str, separator: str, is_refused: bool):
    plan = replace(PAIRS, literals=("", separator, ""))
    batch = rows(k0=[part], k1=["b"], v0=["1"])
    if is_refused:
        with pytest.raises(RowError, match="separator"):
            changes(plan, batch)
    else:
        assert changes(plan, batch) == [put(b"-a--b", b"1")]


def test_last_key_part_may_contain_separator():
    assert changes(PAIRS, rows(k0=["a"], k1=["b:c"], v0=["1"])) == [put(b"job:temp:a:b:c", b"1")]


def test_longest_key_passes_and_one_byte_more_is_refused():
    fits = "k" * (KEY_BYTES_MAX - len("job:temp:"))
    assert len(changes(VALUES, rows(k0=[fits], v0=["1"]))) == 1
    with pytest.raises(RowError, match=f"a key made of the column 'sensor' has {KEY_BYTES_MAX + 1} bytes"):
        changes(VALUES, rows(k0=[fits + "k"], v0=["1"]))


def test_field_that_is_too_long_is_refused():
    with pytest.raises(RowError, match="state 'temp': a field made of the column 'day' has"):
        changes(FIELDS, rows(k0=["a"], f=["f" * (KEY_BYTES_MAX + 1)], v0=["1"]))


def test_value_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(encoding, "VALUE_BYTES_MAX", 10)
    assert len(changes(VALUES, rows(k0=["a"], v0=["v" * 10]))) == 1
    with pytest.raises(RowError, match="state 'temp': a value made of the column 'temp' has 11 bytes; the limit is 10"):
        changes(VALUES, rows(k0=["a"], v0=["v" * 11]))
    assert VALUE_BYTES_MAX == 64 << 20


# Runs -----------------------------------------------------------------------------------------------------------------


def test_runs_have_schema_of_log_and_are_sorted_by_position():
    batches = [rows(k0=[f"{i}" for i in range(start, start + 100)], v0=["v"] * 100) for start in range(0, 1000, 100)]
    (run,) = encode([VALUES], batches, [0])
    assert run.schema == schema()
    positions = run.column("position").to_pylist()
    assert positions == sorted(positions)
    assert run.num_rows == 1000


def test_runs_are_within_row_limit():
    keys = [f"{i:07d}" for i in range(RUN_ROWS_MAX * 2 + 5)]
    one_batch = rows(k0=keys, v0=["v"] * len(keys))
    for batches in ([one_batch], [one_batch.slice(at, 10_000) for at in range(0, len(keys), 10_000)]):
        runs = list(encode([VALUES], batches, [0]))
        assert max(run.num_rows for run in runs) <= RUN_ROWS_MAX
        assert sum(run.num_rows for run in runs) == len(keys)


def test_runs_of_several_rows_are_within_byte_limit():
    sizes = [1000] * 40 + [RUN_BYTES_MAX // 3] * 5 + [RUN_BYTES_MAX + 1]
    batch = rows(k0=[f"{i:03d}" for i in range(len(sizes))], v0=["v" * size for size in sizes])
    runs = list(encode([VALUES], [batch], [0]))
    assert all(run.nbytes <= RUN_BYTES_MAX or run.num_rows == 1 for run in runs)
    assert sum(run.num_rows for run in runs) == len(sizes)


def test_digest_is_independent_of_order_and_chunks_of_rows():
    hashes = np.array([2**63 - 1, -(2**63), 5, -1], np.int64)
    keys = ["a", "b", "c", "d"]
    forward, backward = [0], [0]
    list(encode([VALUES], [rows(k0=keys, v0=keys, h=pa.array(hashes))], forward))
    cut = [rows(k0=[key], v0=[key], h=pa.array([each])) for key, each in zip(keys, hashes, strict=True)]
    list(encode([VALUES], reversed(cut), backward))
    assert forward[0] % 2**64 == backward[0] % 2**64 == int(hashes.astype(np.uint64).sum(dtype=np.uint64))


# Forms ----------------------------------------------------------------------------------------------------------------


def text(array: pa.Array, form: str) -> list[str | None]:
    """Return the bytes of a column as text."""
    return [None if each is None else each.decode() for each in as_bytes(array, form).to_pylist()]


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0.0, "0"),
        (-0.0, "-0"),
        (1.0, "1"),
        (-1.5, "-1.5"),
        (0.1, "0.1"),
        (98.06, "98.06"),
        (1e-6, "0.000001"),
        (1e-7, "0.0000001"),
        (9.99e-8, "9.99e-8"),
        (5e-324, "5e-324"),
        (1e10, "10000000000"),
        (123456789012345680.0, "123456789012345680"),
        (1e20, "100000000000000000000"),
        (1e21, "1e+21"),
        (1.5e300, "1.5e+300"),
        (-1.7976931348623157e308, "-1.7976931348623157e+308"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        (None, None),
    ],
)
def test_double_is_its_shortest_text(number: float | None, expected: str | None):
    assert text(pa.array([number], pa.float64()), "float") == [expected]


def test_float_is_shortest_text_of_32_bits():
    numbers = pa.array([0.1, 16777216.0, 3.4028235e38, 1e-45, 1 / 3], pa.float32())
    assert text(numbers, "float") == ["0.1", "16777216", "3.4028235e+38", "1e-45", "0.33333334"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_decimal_is_plain(kind: pa.DataType):
    texts = ["1.50", "0E-18", "-1E+3", None, "123456789012345678901234567890.12345678", "1E-7"]
    expected = ["1.50", "0." + "0" * 18, "-1000", None, "123456789012345678901234567890.12345678", "0.0000001"]
    assert text(pa.array(texts, kind), "decimal") == expected
    assert [each and Decimal(each) for each in expected] == [each and Decimal(each) for each in texts]


@pytest.mark.parametrize(
    ("instant", "expected"),
    [
        (datetime(2013, 7, 4, 10), "2013-07-04T10:00:00"),
        (datetime(2013, 7, 4, 10, 0, 0, 500_000), "2013-07-04T10:00:00.5"),
        (datetime(2013, 7, 4, 10, 0, 10, 1), "2013-07-04T10:00:10.000001"),
        (datetime(1969, 12, 31, 23, 59, 59, 999_999), "1969-12-31T23:59:59.999999"),
        (datetime(1900, 1, 1), "1900-01-01T00:00:00"),
        (datetime(1, 1, 1), "0001-01-01T00:00:00"),
        (datetime(9999, 12, 31, 23, 59, 59, 999_000), "9999-12-31T23:59:59.999"),
    ],
)
def test_timestamp_without_fraction_is_written_without(instant: datetime, expected: str):
    assert text(pa.array([instant, None], pa.timestamp("us")), "timestamp_ntz") == [expected, None]
    assert text(pa.array([instant.replace(tzinfo=UTC)], pa.timestamp("us", "UTC")), "timestamp") == [expected + "Z"]


@pytest.mark.parametrize(
    ("micros", "expected"),
    [
        (-(2**63), "-290308-12-21T19:59:05.224192"),
        (2**63 - 1, "+294247-01-10T04:00:54.775807"),
        (9 * 10**18, "+287168-08-24T16:00:00"),
        (10**15 * 280, "+10842-11-05T17:46:40"),
    ],
)
def test_timestamps_of_sparks_whole_range_are_written(micros: int, expected: str):
    near = 1372932000 * 10**6
    for others, texts in (([near], ["2013-07-04T10:00:00"]), ([near + 1], ["2013-07-04T10:00:00.000001"])):
        column = pa.array([micros, None, *others], pa.timestamp("us"))
        assert text(column, "timestamp_ntz") == [expected, None, *texts]


def test_timestamp_of_another_zone_is_written_in_utc():
    instant = datetime(2013, 7, 4, 10, tzinfo=timezone(timedelta(hours=-4)))
    assert text(pa.array([instant], pa.timestamp("us", "America/New_York")), "timestamp") == ["2013-07-04T14:00:00Z"]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_bytes_stay_as_they_are(kind: pa.DataType):
    raw = [b"", b"\0\xff\r\n", None]
    assert as_bytes(pa.array(raw, kind), "text").to_pylist() == raw
    assert as_bytes(pa.array(raw, kind), "text").type == pa.binary()


def test_packed_columns_mark_empty_maps():
    packed, is_empty = pack_columns(("a", "b"), [pa.array([b"1", None]), pa.array([None, None], pa.binary())])
    assert is_empty.to_pylist() == [False, True]
    assert packed[1].as_py() == packed_map.EMPTY


def test_row_may_have_its_own_expiry():
    batch = rows(k0=["a", "b", "c"], v0=["1", "2", None], e=[1_000, None, 3_000])
    assert changes(VALUES, batch) == [
        put(b"job:temp:a", b"1", 1_000),
        put(b"job:temp:b", b"2"),
        delete(b"job:temp:c"),
    ]


def test_row_of_list_may_empty_it_first():
    plan = replace(VALUES, appends=True, keeps_last=True)
    batch = rows(
        k0=["a", "a", "a", "b", "c"],
        v0=["1", "2", "3", "4", None],
        r=[False, True, None, True, True],
        d=[False, False, False, False, True],
    )
    assert changes(plan, batch) == [
        Change("temp", Op.APPEND, b"job:temp:a", None, b"1"),
        put(b"job:temp:a", packed_list.pack([b"2"])),
        Change("temp", Op.APPEND, b"job:temp:a", None, b"3"),
        put(b"job:temp:b", packed_list.pack([b"4"])),
        delete(b"job:temp:c"),
    ]
