"""What cannot work is refused, by name, and before the first micro-batch wherever that can be known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import sparkis
from compat.waiting import eventually
from sparkis import SparkisError, StateDescriptor
from state_backend.model.errors import DescriptorError, LogUnavailableError
from tests.spark.micro_batches import Batches, failure_of, start

Make = Callable[[str], Batches]

COLUMNS = "k string, v int, f string, b binary, gone boolean, nested struct<a: int>, `dotted.name` string"


@pytest.fixture(scope="module")
def rows(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Batches:
    """A stream of which no test reads a row."""
    return Batches(spark, tmp_path_factory.mktemp("input") / "rows", COLUMNS)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


GOOD: dict[str, Any] = {"key": "k", "value": "v"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            {"key": "K", "value": "v"},
            r"state 's': key= names the column 'K', which the DataFrame does not have; did you",
        ),
        ({"key": "k", "value": "w"}, r"state 's': value= names the column 'w'"),
        (GOOD | {"field": "g"}, r"state 's': field= names the column 'g'"),
        (GOOD | {"order_by": "t"}, r"state 's': order_by= names the column 't'"),
        (GOOD | {"deletion": "d"}, r"state 's': deletion= names the column 'd'"),
        (GOOD | {"deletion": "v"}, r"the deletion column 'v' has the type int; it must be boolean"),
        (GOOD | {"where": "v +"}, r"state 's': where='v \+' is not a condition"),
        (GOOD | {"where": "v + 1"}, r"state 's': where='v \+ 1' is not a condition"),
        (GOOD | {"where": "nope = 1"}, r"state 's': where='nope = 1' is not a condition.*nope"),
        ({"key": "nested", "value": "v"}, r"the key column 'nested' has the type struct<a:int>, which has no text"),
        (GOOD | {"field": "nested"}, r"the field column 'nested' has the type struct<a:int>"),
        (GOOD | {"encoding": "binary"}, r"the value column 'v' has the type int, but encoding='binary'"),
        (GOOD | {"encoding": "xml"}, r"encoding= is one of 'text', 'json', 'binary', not 'xml'"),
        (GOOD | {"kind": "tree"}, r"kind= is one of 'value', 'map', 'list', 'set', 'sorted-set', not 'tree'"),
        (GOOD | {"member": "f"}, r"member= makes a set, which has no value; leave out value=, or member="),
        ({"key": "k", "member": "g"}, r"state 's': member= names the column 'g'"),
        ({"key": "k", "member": "f", "score": "g"}, r"state 's': score= names the column 'g'"),
        ({"key": "k", "member": "f", "score": "k"}, r"the score column 'k' has the type string, and a score is a numb"),
        ({"key": "k", "member": "nested"}, r"the member column 'nested' has the type struct<a:int>"),
        (GOOD | {"length_max": 5}, r"length_max= is a number of elements, at least 1, of a state with kind='list'"),
        (GOOD | {"kind": "list", "length_max": 0}, r"length_max= is a number of elements, at least 1"),
        (GOOD | {"duplicates": "last"}, r"duplicates= is 'error' or 'any', not 'last'"),
        (GOOD | {"ttl": 0}, r"ttl= is a timedelta or seconds"),
        (GOOD | {"ttl": "1h"}, r"ttl= is a timedelta or seconds"),
        (GOOD | {"separator": 5}, r"separator= must be a string"),
        ({"key": ["k", "f"], "value": "v", "separator": ""}, r"nothing between two columns"),
        ({"value": "v"}, r"give either key= or key_format="),
        ({"key": "k", "key_format": "<k>", "value": "v"}, r"give either key= or key_format="),
        ({"key_format": "plane", "value": "v"}, r"names no column"),
        ({"key": "k"}, r"value= must name at least one column"),
        ({"key": "k", "value": ["v", "v"]}, r"value= names a column twice"),
        (GOOD | {"kye": "k"}, r"kye: not an argument of a state; did you mean key=\? The arguments are key, value"),
        (GOOD | {"mode": "upsert"}, r"mode= is one of 'update', 'append', 'complete', not 'upsert'"),
        (GOOD | {"on_rewind": "ignore"}, r"on_rewind= is one of 'refuse', 'truncate', not 'ignore'"),
        (GOOD | {"wait_for_visibility": "yes"}, r"wait_for_visibility= is True, False or seconds, not 'yes'"),
        (GOOD | {"wait_for_visibility": -1}, r"wait_for_visibility="),
        (GOOD | {"job": "a b"}, r"the job name 'a b' may not contain white space"),
        (GOOD | {"job": ""}, r"the job name must be a non-empty string"),
    ],
)
def test_wrong_argument_is_refused_by_name(rows: Batches, log: Path, arguments: dict[str, Any], complaint: str):
    with pytest.raises(DescriptorError, match=f"(?s){complaint}"):
        sparkis.queryable(rows.df, "s", **({"log": log, "mode": "append"} | arguments))
    assert not list(log.glob("*"))


@pytest.mark.parametrize("name", ["a:b", "a b", "a{b", "a}b", "", ".a", "a/b", "a<b"])
def test_state_name_with_bad_characters_is_refused(rows: Batches, log: Path, name: str):
    with pytest.raises(DescriptorError, match="the state name"):
        sparkis.queryable(rows.df, name, log=log, **GOOD)


def test_type_without_text_is_refused_as_key_and_value(rows: Batches, log: Path):
    df = rows.df.selectExpr("k", "v", "NULL AS odd")
    with pytest.raises(DescriptorError, match="the key column 'odd' has the type void"):
        sparkis.queryable(df, "s", key="odd", value="v", log=log)
    with pytest.raises(DescriptorError, match=r"the value column 'odd' has the type void.*cast it"):
        sparkis.queryable(df, "s", key="k", value="odd", log=log)


def test_error_of_spark_analysis_is_raised_before_start(rows: Batches, log: Path):
    twins = rows.df.selectExpr("k", "v", "v AS V")
    with pytest.raises(DescriptorError, match=r"state 's': Spark cannot read its columns: \[AMBIGUOUS_REFERENCE\]"):
        sparkis.queryable(twins, "s", key="k", value="v", log=log)
    same = rows.df.select("k", "v", "v")
    with pytest.raises(DescriptorError, match="has several columns 'v'; rename them"):
        sparkis.queryable(same, "s", key="k", value="v", log=log)


@pytest.mark.parametrize(
    ("states", "complaint"),
    [
        ((StateDescriptor("s", **GOOD), StateDescriptor("s", **GOOD)), "declares the state 's' twice"),
        (
            (StateDescriptor("s", key_format="x<k>", value="v"), StateDescriptor("t", key_format="x<f>", value="v")),
            "states 's' and 't' of job 'job' could make the same key",
        ),
        ((), "declares no state"),
        (("s", "t"), "give several states as sparkis.StateDescriptor"),
    ],
)
def test_states_that_cannot_live_together_are_refused(rows: Batches, log: Path, states: Any, complaint: str):
    with pytest.raises(DescriptorError, match=complaint):
        sparkis.queryable(rows.df, *states, log=log)


def test_arguments_beside_descriptor_or_without_state_are_refused(rows: Batches, log: Path):
    with pytest.raises(DescriptorError, match="key: pass this to the StateDescriptor"):
        sparkis.queryable(rows.df, StateDescriptor("s", **GOOD), key="k", log=log)
    with pytest.raises(DescriptorError, match="the state has no name"):
        sparkis.queryable(rows.df, log=log, **GOOD)


def test_only_streaming_dataframe_of_classic_session_is_taken(spark: SparkSession, log: Path):
    with pytest.raises(DescriptorError, match="takes a streaming DataFrame"):
        sparkis.queryable(spark.range(3), "s", key="id", value="id", log=log)
    with pytest.raises(DescriptorError, match=r"not builtins\.str"):
        sparkis.queryable("df", "s", key="id", value="id", log=log)  # type: ignore[arg-type]


def test_log_is_needed_and_must_be_writable(rows: Batches, tmp_path: Path):
    with pytest.raises(DescriptorError, match=r"no change log to write to.*spark\.sparkis\.log"):
        sparkis.queryable(rows.df, "s", **GOOD)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(LogUnavailableError, match=f"{file}"):
        sparkis.queryable(rows.df, "s", log=file, **GOOD)
    with pytest.raises(LogUnavailableError, match="nosuch://"):
        sparkis.queryable(rows.df, "s", log="nosuch://bucket/log", **GOOD)


def test_number_of_partitions_is_number(spark: SparkSession, rows: Batches, log: Path):
    for wrong in ("0", "many", "-1"):
        spark.conf.set("spark.sparkis.partitions", wrong)
        try:
            with pytest.raises(DescriptorError, match=r"spark\.sparkis\.partitions is a number of partitions"):
                sparkis.queryable(rows.df, "s", log=log, **GOOD)
        finally:
            spark.conf.unset("spark.sparkis.partitions")


def test_stream_writer_refuses_options_without_effect(rows: Batches, log: Path):
    writer = sparkis.queryable(rows.df, "s", log=log, mode="append", **GOOD)
    with pytest.raises(DescriptorError, match=r"trigger\(continuous=\.\.\.\) has no micro-batches.*availableNow=True"):
        writer.trigger(continuous="1 second")
    with pytest.raises(DescriptorError, match=r"Spark refuses foreachBatch.* read its state with sparkis\.attach"):
        writer.trigger(realTime="5 minutes")
    with pytest.raises(DescriptorError, match="pass mode='update'"):
        writer.outputMode("update")
    assert writer.outputMode("append") is writer
    for call in (
        lambda: writer.foreachBatch(print),
        lambda: writer.foreach(print),
        lambda: writer.format("console"),
        lambda: writer.toTable("table"),
        lambda: writer.queryName("q").start(format="memory"),
    ):
        with pytest.raises(DescriptorError, match=r"is the sink of this query.*sparkis\.publish"):
            call()
    for name in ("a:b", "a b"):
        with pytest.raises(DescriptorError, match="the query name"):
            writer.queryName(name)
        with pytest.raises(DescriptorError, match="the query name"):
            writer.start(queryName=name)
    assert not log.exists() or not list(log.iterdir())


def test_query_needs_name_or_job(rows: Batches, log: Path):
    with pytest.raises(DescriptorError, match=r"the query has no name.*queryName"):
        sparkis.queryable(rows.df, "s", log=log, **GOOD).start()


def test_job_name_frees_query_name(batches: Make, log: Path, tmp_path: Path):
    stream = batches(COLUMNS)
    stream.add({"k": "a", "v": 1})
    writer = sparkis.queryable(stream.df, "s", log=log, mode="append", job="job", **GOOD)
    start(writer, "a name: with everything", tmp_path / "checkpoint")
    with sparkis.read_snapshot(log, "job") as snapshot:
        assert snapshot.value(b"job:s:a") == b"1"


@pytest.mark.parametrize(
    ("row", "arguments", "complaint"),
    [
        ({"k": None, "v": 1}, GOOD, "state 's': the key column 'k' is null in 1 row(s)"),
        ({"k": "a", "v": 1}, GOOD | {"field": "f"}, "state 's': the field column 'f' is null in 1 row(s)"),
        (
            {"k": "a:b", "f": "c", "v": 1},
            {"key": ["k", "f"], "value": "v"},
            "state 's': the key column 'k' has the value b'a:b', which contains the separator b':'",
        ),
    ],
)
def test_row_that_cannot_be_change_fails_batch_and_query_can_continue(
    batches: Make, log: Path, tmp_path: Path, row: dict[str, Any], arguments: dict[str, Any], complaint: str
):
    stream = batches(COLUMNS)
    stream.add(row, {"k": "fine", "f": "x", "v": 1})

    def run(where: str | None) -> Any:
        writer = sparkis.queryable(stream.df, "s", log=log, mode="append", where=where, **arguments)
        return writer.queryName("rows").option("checkpointLocation", str(tmp_path / "checkpoint")).start()

    message = failure_of(run(None))
    assert f"job 'rows', batch 0: {complaint}" in message
    with pytest.raises(SparkisError), sparkis.read_snapshot(log, "rows"):
        pass
    run("k = 'fine'").processAllAvailable()
    with sparkis.read_snapshot(log, "rows") as snapshot:
        assert snapshot.applied.key_count == 1


def test_numbers_and_timestamps_in_key_are_held_apart(batches: Make, log: Path, tmp_path: Path):
    stream = batches("a double, b double, t timestamp")
    stream.add({"a": 1.5, "b": 5, "t": "2020-01-01T00:00:00Z"})
    for name, key, separator, is_refused in (
        ("dots", ["a", "b"], ".", True),
        ("colons", ["t", "a"], ":", False),
    ):
        writer = sparkis.queryable(stream.df, "s", log=log, mode="append", key=key, separator=separator, value="b")
        query = writer.queryName(name).option("checkpointLocation", str(tmp_path / name)).start()
        if is_refused:
            assert "the key column 'a' has the value b'1.5'" in failure_of(query)
        else:
            query.processAllAvailable()
            with sparkis.read_snapshot(log, name) as snapshot:
                assert snapshot.value(b"colons:s:2020-01-01T00:00:00Z:1.5") == b"5"


def test_state_that_changed_its_kind_is_refused_at_start(batches: Make, log: Path, tmp_path: Path):
    stream = batches(COLUMNS)
    stream.add({"k": "a", "f": "x", "v": 1})

    def begin(**arguments: Any) -> Any:
        writer = sparkis.queryable(stream.df, "s", log=log, mode="append", **arguments)
        return start(writer, "kinds", tmp_path / "checkpoint")

    begin(**GOOD).stop()
    changed = "the state 's' has changed: its kind was 'value' in this log and is now 'map'"
    with pytest.raises(DescriptorError, match=changed):
        begin(**GOOD, field="f")
    begin(**GOOD)


@pytest.mark.slow
def test_replaced_query_of_same_name_is_fenced(batches: Make, log: Path, tmp_path: Path):
    stream = batches(COLUMNS)

    def begin(query_name: str, **given: Any) -> Any:
        writer = sparkis.queryable(stream.df, "s", log=log, mode="append", job="shared", **GOOD, **given)
        return start(writer, query_name, tmp_path / query_name)

    older = begin("older")
    stream.add({"k": "a", "v": 1})
    older.processAllAvailable()
    with pytest.raises(SparkisError, match=f"is being written by query {older.id}"):
        begin("newer")
    newer = begin("newest", takeover=True)
    newer.processAllAvailable()
    stream.add({"k": "a", "v": 2})
    message = failure_of(older)
    assert f"job 'shared' in the log {log} is now written by query {newer.id}" in message
    assert f"this writer (query {older.id}" in message
    assert "stop one, rename one (queryName or job=), or give it another log" in message

    def value() -> bytes | None:
        with sparkis.read_snapshot(log, "shared") as snapshot:
            return snapshot.value(b"shared:s:a")

    # The new generation is held back until it has caught up.
    eventually(value, lambda found: found == b"2")


def test_server_that_cannot_start_is_error(spark: SparkSession, tmp_path: Path):
    first = sparkis.serve(spark, log=tmp_path / "log", placement=sparkis.Driver(store=tmp_path / "store"))
    try:
        with pytest.raises(SparkisError, match=rf"did not start: .*{first.port}.*in use"):
            sparkis.serve(spark, log=tmp_path / "other", port=first.port)
        with pytest.raises(SparkisError, match=r"did not start: .*the store folder .* is in use by process"):
            sparkis.serve(spark, log=tmp_path / "other", placement=sparkis.Driver(store=tmp_path / "store"))
        with pytest.raises(LogUnavailableError):
            sparkis.serve(spark, log="/dev/null/log")
    finally:
        first.stop()
        spark.conf.unset("spark.sparkis.log")


def test_failure_in_user_function_is_one_line_after_spark_output(
    batches: Make, log: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    rows = batches("k string, v int")
    rows.add({"k": None, "v": 1})
    stream = rows.df.writeStream.foreachBatch(
        lambda batch, batch_id: sparkis.publish(batch, batch_id, "s", key="k", value="v", job="own", log=log)
    )
    query = stream.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    line = "job 'own', batch 0: state 's': the key column 'k' is null in 1 row(s) of a batch; filter them out"
    eventually(lambda: [message for message in caplog.messages if message.startswith(line)])
    assert not query.isActive  # by then Spark has logged its own
    assert "\n" not in caplog.messages[-1]
