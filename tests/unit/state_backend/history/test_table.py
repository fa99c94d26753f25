"""A state as a table: its columns, their types, and past moments."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from state_backend.apply.replay import read_snapshot
from state_backend.history.table import read_table
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import LogError
from state_backend.model.records import Change, Op
from tests.builders import write_log

PUT = Op.PUT
TYPED = StateDescriptor(
    "typed",
    key=["day", "city"],
    value=["n", "x", "price", "at", "is_open", "what"],
    separator="/",
    columns={
        "day": "date", "city": "string", "n": "bigint", "x": "double", "price": "decimal(10,2)", "at": "timestamp",
        "is_open": "boolean", "what": "array<int>",
    },
)  # fmt: skip
DOCUMENT = StateDescriptor(
    "document", "id", ["a", "b"], kind="value", columns={"id": "int", "a": "double", "b": "string"}
)
BY_FIELD = StateDescriptor("by_field", "id", "n", field="f", columns={"id": "int", "n": "bigint", "f": "date"})
LAST = StateDescriptor("last", "id", "v", kind="list", columns={"id": "string", "v": "int"})
TAGS = StateDescriptor("tags", "id", member="tag", columns={"tag": "string"})
TOP = StateDescriptor("top", "id", member="who", score="points", columns={"who": "string", "points": "double"})
ANY = StateDescriptor("any", key_format="any/<key>", value="v")
STATES = [TYPED, DOCUMENT, BY_FIELD, LAST, TAGS, TOP, ANY]
EXPIRY_MS = 4_000_000_000_000
EXPIRY = datetime.fromtimestamp(EXPIRY_MS / 1000, UTC)


def put(state: StateDescriptor, key: str, *rest: Any, op: Op = PUT, expire_at_ms: int | None = None) -> Change:
    field, value = rest if len(rest) == 2 else (None, *rest)
    return Change(state.name, op, key.encode(), field, value, expire_at_ms)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    fields = [(b"n", b"5"), (b"x", b"1.5e300"), (b"price", b"12.50"), (b"at", b"2024-02-03T04:05:06.5Z")]
    fields += [(b"is_open", b"true"), (b"what", b"[1,2]")]
    with LogWriter(tmp_path, "job", STATES) as writer:
        writer.publish(
            [
                *(put(TYPED, "job:typed:2024-01-02/Oslo", *each) for each in fields),
                put(TYPED, "job:typed:2024-01-02/a/b", b"n", b"6"),
                put(DOCUMENT, "job:document:7", b'{"a":1e3,"b":"text"}', expire_at_ms=EXPIRY_MS),
                put(DOCUMENT, "job:document:8", b'{"b":"8"}'),
                put(BY_FIELD, "job:by_field:1", b"2024-01-02", b"3", expire_at_ms=EXPIRY_MS),
                put(BY_FIELD, "job:by_field:1", b"2024-01-03", b"4"),
                *(put(LAST, "job:last:a", value, op=Op.APPEND) for value in (b"3", b"1")),
                *(put(TAGS, "job:tags:a", value, b"") for value in (b"red", b"blue")),
                *(put(TOP, "job:top:a", *each) for each in ((b"ann", b"2"), (b"bob", b"1.5"))),
                put(ANY, "any/x", b"\xff"),
            ]
        )
        writer.publish([put(DOCUMENT, "job:document:7", b'{"a":2,"b":null}')])
    return tmp_path


def rows(*arguments: Any, **options: Any) -> list[dict[str, Any]]:
    return list(read_table(*arguments, **options).to_pylist())


def test_columns_have_types_of_spark(log: Path) -> None:
    found = {row["key"]: row for row in rows(log, "job", "typed")}
    assert found["job:typed:2024-01-02/Oslo"] == {
        "key": "job:typed:2024-01-02/Oslo",
        "day": date(2024, 1, 2),
        "city": "Oslo",
        "n": 5,
        "x": 1.5e300,
        "price": Decimal("12.50"),
        "at": datetime(2024, 2, 3, 4, 5, 6, 500_000, UTC),
        "is_open": True,
        "what": "[1,2]",
        "expire_at": None,
    }


def test_columns_of_ambiguous_key_are_null(log: Path) -> None:
    (row,) = [row for row in rows(log, "job", "typed") if row["key"].endswith("a/b")]
    assert (row["day"], row["city"], row["n"], row["x"]) == (None, None, 6, None)


def test_time_in_key_is_distinguished_from_text_after_it(tmp_path: Path) -> None:
    windows = StateDescriptor(
        "windows", key=("window", "side"), value="n", columns={"window": "timestamp", "side": "string", "n": "int"}
    )
    with LogWriter(tmp_path, "job", [windows]) as writer:
        keys = ("2024-01-02T03:04:05.5Z:le:ft", "2024-01-02T03:04:05Z:", "none:left")
        writer.publish([put(windows, f"job:windows:{key}", b"1") for key in keys])
    assert sorted((str(row["window"]), row["side"]) for row in rows(tmp_path, "job", "windows")) == [
        ("2024-01-02 03:04:05+00:00", ""),
        ("2024-01-02 03:04:05.500000+00:00", "le:ft"),
        ("None", None),
    ]


def test_document_has_column_for_each_value_and_expiry(log: Path) -> None:
    assert sorted(rows(log, "job", "document", as_of=0), key=lambda row: row["id"]) == [
        {"id": 7, "a": 1000.0, "b": "text", "expire_at": EXPIRY},
        {"id": 8, "a": None, "b": "8", "expire_at": None},
    ]


def test_newest_epoch_is_default(log: Path) -> None:
    assert {row["id"]: row["a"] for row in rows(log, "job", "document")} == {7: 2.0, 8: None}


def test_fields_elements_members_and_scores_are_rows(log: Path) -> None:
    fields = sorted(rows(log, "job", "by_field"), key=lambda row: row["field"])
    assert [(row["id"], row["field"], row["n"], row["expire_at"]) for row in fields] == [
        (1, date(2024, 1, 2), 3, EXPIRY),
        (1, date(2024, 1, 3), 4, None),
    ]
    assert [(row["position"], row["v"]) for row in rows(log, "job", "last")] == [(0, 3), (1, 1)]
    assert sorted(row["member"] for row in rows(log, "job", "tags")) == ["blue", "red"]
    assert [(row["member"], row["score"]) for row in rows(log, "job", "top")] == [("bob", 1.5), ("ann", 2.0)]


def test_text_that_is_not_utf8_is_replaced_and_readable_as_bytes(log: Path) -> None:
    assert rows(log, "job", "any") == [{"key": "x", "v": "\ufffd", "expire_at": None}]
    assert rows(log, "job", "any", raw=True) == [{"key": b"x", "v": b"\xff", "expire_at": None}]


def test_unknown_state_and_unknown_moment_are_refused(log: Path) -> None:
    with pytest.raises(LogError, match="has no state 'none'; states: typed of job job"):
        read_table(log, "job", "none")
    with pytest.raises(LogError, match="epoch 5 is not committed; the last one is 1"):
        read_table(log, "job", "document", as_of=5)
    with pytest.raises(LogError, match="before the first epoch of its state, epoch 0"):
        read_table(log, "job", "document", as_of=datetime(2001, 1, 1))
    with pytest.raises(LogError, match="'yesterday' is not an epoch's number, or a time"):
        read_table(log, "job", "document", as_of="yesterday")


def test_job_precedes_state_and_another_order_is_error(log: Path) -> None:
    assert read_table(log, None, "document").equals(read_table(log, "job", "document"))
    with pytest.raises(LogError, match=r"'document', which is a state of job 'job'.*read_table\(log, job, state\)"):
        read_table(log, "document", "job")
    with pytest.raises(LogError, match="has no job 'none'; jobs: job"):
        read_table(log, "none", "document")
    with pytest.raises(TypeError, match="'state'"):
        read_table(log, "document")  # type: ignore[call-arg]
    with pytest.raises(LogError, match=r"'document' is no epoch's number: read_snapshot\(log, job, epoch\)"):
        read_snapshot(log, "job", "document")  # type: ignore[arg-type]


def test_times_beyond_year_9999_and_bytes_in_json_are_read(tmp_path: Path) -> None:
    kinds = {"k": "date", "at": "timestamp", "b": "binary"}
    state = StateDescriptor("far", key="k", value=["at", "b"], kind="value", columns=kinds)
    with LogWriter(tmp_path, "job", [state]) as writer:
        document = b'{"at":"+10000-01-01T00:00:00.5Z","b":"AP8="}'
        writer.publish([put(state, "job:far:+12345-01-02", document), put(state, "job:far:-0044-03-15", document)])
    table = read_table(tmp_path, "job", "far")
    assert sorted(table.column("k").cast("int32").to_pylist()) == [-735525, 3789392]
    assert table.column("at").cast("int64").to_pylist() == [253402300800500000] * 2
    assert table.column("b").to_pylist() == [b"\x00\xff"] * 2


def test_intervals_of_days_and_seconds_are_durations_and_those_with_months_are_texts(tmp_path: Path) -> None:
    kinds = {"k": "interval hour to second", "days": "interval day", "years": "interval year to month"}
    state = StateDescriptor("spans", key="k", value=["days", "years"], kind="value", columns=kinds)
    document = b'{"days":"P-106751991DT-4H-54.775808S","years":"P-1Y-2M"}'
    write_log(tmp_path, "job", [state], [put(state, f"job:spans:{key}", document) for key in ("PT1H-30M0.5S", "PT0S")])
    table = read_table(tmp_path, "job", "spans")
    assert sorted(table.column("k").cast("int64").to_pylist()) == [0, 1_800_500_000]
    assert set(table.column("days").cast("int64").to_pylist()) == {-(2**63)}
    assert table.column("years").to_pylist() == ["P-1Y-2M"] * 2


@pytest.mark.parametrize("text", ["", "P", "PT", "P1", "1D", "P1Y", "PT1.1234567S", "P200000000D"])
def test_text_that_is_no_interval_of_days_and_seconds_is_error(tmp_path: Path, text: str) -> None:
    state = StateDescriptor("spans", key="k", value="v", columns={"v": "interval day to second"})
    write_log(tmp_path, "job", [state], [put(state, "job:spans:a", text.encode())])
    with pytest.raises(LogError, match=r"column .v. has a value that is not of type duration\[us\]; read it with raw="):
        read_table(tmp_path, "job", "spans")
