"""Every Spark type that may be a key, a field or a value, and the bytes that it becomes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import pyarrow as pa
import pytest
import redis
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

import sparkis
from compat.waiting import eventually
from spark_hooks.publish.columns import check_columns
from sparkis import StateDescriptor
from state_backend.codec.column_text import any_text
from state_backend.codec.json_text import json_texts
from state_backend.model.errors import DescriptorError
from tests.spark.attaching import SEED
from tests.spark.micro_batches import Batches, start


class Case(NamedTuple):
    """An SQL literal, what its text is, and what its JSON is. `is_plain`: it may be a key."""

    name: str
    sql: str
    text: str | bytes
    json: str
    is_plain: bool = True


CASES = [
    Case("string", "'grüße \"x\"\\\\n'", 'grüße "x"\\n', '"grüße \\"x\\"\\\\n"'),
    Case("empty", "''", "", '""'),
    Case("collated", "'Ab' COLLATE UTF8_LCASE", "Ab", '"Ab"'),
    Case("binary", "X'00FF0D0A'", b"\x00\xff\r\n", '"AP8NCg=="'),
    Case("byte", "-128Y", "-128", "-128"),
    Case("short", "32767S", "32767", "32767"),
    Case("int", "-1", "-1", "-1"),
    Case("long", "9223372036854775807L", "9223372036854775807", "9223372036854775807"),
    Case("float", "CAST(0.1 AS FLOAT)", "0.1", "0.1"),
    Case("double", "1e20D", "100000000000000000000", "100000000000000000000"),
    Case("nan", "DOUBLE('NaN')", "nan", '"nan"'),
    Case("infinity", "-DOUBLE('Infinity')", "-inf", '"-inf"'),
    Case("zero", "0.0D", "0", "0"),
    Case("decimal", "CAST(1.5 AS DECIMAL(20,4))", "1.5000", "1.5000"),
    Case("small", "CAST(0 AS DECIMAL(38,18))", "0." + "0" * 18, "0." + "0" * 18),
    Case("true", "true", "true", "true"),
    Case("date", "DATE'2013-07-04'", "2013-07-04", '"2013-07-04"'),
    Case("old", "DATE'0001-01-01'", "0001-01-01", '"0001-01-01"'),
    Case("instant", "TIMESTAMP'2013-07-04 10:00:00+02:00'", "2013-07-04T08:00:00Z", '"2013-07-04T08:00:00Z"'),
    Case(
        "micros",
        "TIMESTAMP'1969-12-31 23:59:59.999999Z'",
        "1969-12-31T23:59:59.999999Z",
        '"1969-12-31T23:59:59.999999Z"',
    ),
    Case("wall", "TIMESTAMP_NTZ'2013-07-04 10:00:00.25'", "2013-07-04T10:00:00.25", '"2013-07-04T10:00:00.25"'),
    Case("time", "TIME'10:00:00.25'", "10:00:00.25", '"10:00:00.25"'),
    Case(
        "clocks",
        "map(TIME'01:02:03', array(TIME'00:00:00', TIME'23:59:59.999999', NULL))",
        '{"01:02:03":["00:00:00","23:59:59.999999",null]}',
        '{"01:02:03":["00:00:00","23:59:59.999999",null]}',
        False,
    ),
    Case("struct", "named_struct('a', 1, 'b', CAST(NULL AS INT))", '{"a":1,"b":null}', '{"a":1,"b":null}', False),
    Case("array", "array(1, NULL, 3)", "[1,null,3]", "[1,null,3]", False),
    Case("map", "map('x', 1.5D)", '{"x":1.5}', '{"x":1.5}', False),
    Case("days", "INTERVAL '1 02:03:04.5' DAY TO SECOND", "P1DT2H3M4.5S", '"P1DT2H3M4.5S"'),
    Case("months", "INTERVAL '-1-2' YEAR TO MONTH", "P-1Y-2M", '"P-1Y-2M"'),
    Case("calendar", "make_interval(1, -2, 0, 3, 4, 0, -5)", "P10M3DT3H59M55S", '"P10M3DT3H59M55S"'),
    Case("keys", "map(named_struct('a', 1), 2)", '{"{\\"a\\":1}":2}', '{"{\\"a\\":1}":2}', False),
    Case("bytes", "map(X'FF', INTERVAL '2' HOUR)", '{"/w==":"PT2H"}', '{"/w==":"PT2H"}', False),
    Case("times", "array(INTERVAL '3' MONTH, NULL)", '["P3M",null]', '["P3M",null]', False),
    Case(
        "variants",
        'array(parse_json(\'{"b": 1e-7, "a": [2.50, true, null]}\'), '
        "to_variant_object(named_struct('t', DATE'2013-07-04')))",
        '[{"a":[2.50,true,null],"b":0.0000001},{"t":"2013-07-04"}]',
        '[{"a":[2.50,true,null],"b":0.0000001},{"t":"2013-07-04"}]',
        False,
    ),
    Case("variant", 'parse_json(\'{"a": [1, "b"]}\')', '{"a":[1,"b"]}', '{"a":[1,"b"]}', False),
]
PLAIN = [case for case in CASES if case.is_plain]
FIELDS = ("binary", "double", "wall")


def as_bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


def states() -> Iterator[StateDescriptor]:
    """Declare all types as a map's values, as text and as JSON, as one key's parts, and some as fields and values."""
    names = [case.name for case in CASES]
    yield StateDescriptor("map", key="id", value=names)
    yield StateDescriptor("maps", key="id", value=names, encoding="json")
    yield StateDescriptor("object", key="id", value=names, encoding="json", kind="value")
    yield StateDescriptor("objects", key="id", field="id", value=names, encoding="json")
    yield StateDescriptor("raw", key="id", value="binary", encoding="binary")
    yield StateDescriptor("text", key="id", value="variant")
    yield StateDescriptor("json", key="id", value="string", encoding="json")
    yield StateDescriptor(
        "key", key=["id", *(case.name for case in PLAIN)], separator="|", value="int", where="id = 'full'"
    )
    for name in FIELDS:
        yield StateDescriptor(f"field-{name}", key="id", field=name, value="id", where="id = 'full'")


@pytest.fixture(scope="module", params=["plain", pytest.param("large", marks=pytest.mark.slow)])
def served(
    request: pytest.FixtureRequest,
    spark: SparkSession,
    endpoint: sparkis.ServedEndpoint,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[redis.Redis]:
    """The types' job: an epoch of one full row, one with every column null, and a second epoch of the first's nulls.

    Once with Arrow's usual columns and once with its large ones.
    """
    name = str(request.param)
    spark.conf.set("spark.sql.execution.arrow.useLargeVarTypes", str(name == "large").lower())
    spark.conf.set("spark.sparkis.partitions", "1")
    spark.conf.set("spark.sql.timeType.enabled", "true")  # off by default
    full = spark.sql(f"SELECT 'full' AS id, {', '.join(f'{case.sql} AS `{case.name}`' for case in CASES)}")
    nulls = [f"IF(id = 'never', `{case.name}`, NULL) AS `{case.name}`" for case in CASES]
    ended = full.withColumn("id", F.lit("ended"))
    void = full.withColumn("id", F.lit("void")).selectExpr("id", *nulls)
    epochs = [full.unionByName(void).unionByName(ended), ended.selectExpr("id", *nulls)]
    descriptors = list(states())

    def publish(batch: DataFrame, batch_id: int) -> None:
        sparkis.publish(epochs[min(batch_id, 1)], batch_id, *descriptors, job=name, wait_for_visibility=True)

    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
    query = source.writeStream.foreachBatch(publish).option("checkpointLocation", str(tmp_path_factory.mktemp(name)))
    running = query.trigger(processingTime="0 seconds").start()
    eventually(lambda: running.exception() or (running.lastProgress or {"batchId": 0})["batchId"], bool)
    running.stop()
    assert running.exception() is None
    with redis.Redis.from_url(endpoint.url) as client:
        yield client


def job(request: pytest.FixtureRequest) -> str:
    return str(request.node.callspec.params["served"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_value_is_its_text_and_its_json(request: pytest.FixtureRequest, served: redis.Redis, case: Case):
    assert served.hget(f"{job(request)}:map:full", case.name) == as_bytes(case.text)
    assert served.hget(f"{job(request)}:maps:full", case.name) == case.json.encode()
    json.loads(case.json)


def test_key_is_texts_of_its_columns(request: pytest.FixtureRequest, served: redis.Redis):
    key = b"|".join([f"{job(request)}:key:full".encode(), *(as_bytes(case.text) for case in PLAIN)])
    assert served.get(key) == b"-1"


def test_field_is_text_of_its_column(request: pytest.FixtureRequest, served: redis.Redis):
    texts = {case.name: as_bytes(case.text) for case in CASES}
    for name in FIELDS:
        assert served.hgetall(f"{job(request)}:field-{name}:full") == {texts[name]: b"full"}


def test_value_alone_equals_value_in_map(request: pytest.FixtureRequest, served: redis.Redis):
    assert served.get(f"{job(request)}:text:full") == served.hget(f"{job(request)}:map:full", "variant")
    assert served.get(f"{job(request)}:json:full") == served.hget(f"{job(request)}:maps:full", "string")


def test_object_has_member_for_each_column(request: pytest.FixtureRequest, served: redis.Redis):
    whole = "{" + ",".join(f'"{case.name}":{case.json}' for case in CASES) + "}"
    assert served.get(f"{job(request)}:object:full") == whole.encode()
    assert served.hgetall(f"{job(request)}:objects:full") == {b"full": whole.encode()}


def test_binary_is_as_it_is(request: pytest.FixtureRequest, served: redis.Redis):
    assert served.get(f"{job(request)}:raw:full") == b"\x00\xff\r\n"


@pytest.mark.parametrize("id", ["void", "ended"])
def test_row_of_nulls_is_nothing_and_deletes(request: pytest.FixtureRequest, served: redis.Redis, id: str):
    assert not list(served.scan_iter(f"{job(request)}:*:{id}", count=1000))


def test_describe_names_types(request: pytest.FixtureRequest, served: redis.Redis):
    described = served.execute_command("STATE", "DESCRIBE", f"{job(request)}:text")
    assert described[b"columns"] == {b"id": b"string", b"variant": b"variant"}


def test_collation_does_not_join_keys(spark: SparkSession, endpoint: sparkis.ServedEndpoint, batches, tmp_path: Path):
    rows = batches("k string, v int")
    rows.add({"k": "a", "v": 1}, {"k": "A", "v": 2}, {"k": "a", "v": 3})
    lower = rows.df.selectExpr("k COLLATE UTF8_LCASE AS k", "v")
    loose = sparkis.queryable(lower, "s", key="k", value="v", mode="append", order_by="v", wait_for_visibility=True)
    query = loose.queryName("collated").option("checkpointLocation", str(tmp_path / "loose")).start()
    query.processAllAvailable()
    with redis.Redis.from_url(endpoint.url, decode_responses=True) as client:
        assert client.mget("collated:s:a", "collated:s:A") == ["3", "2"]
    strict = sparkis.queryable(lower, "s", key="k", value="v", mode="append")
    refused = strict.queryName("strict").option("checkpointLocation", str(tmp_path / "strict")).start()
    with pytest.raises(Exception, match="several rows for the key b'strict:s:a'"):
        refused.processAllAvailable()


@pytest.mark.versions
def test_user_defined_type_is_json_of_its_stored_form(spark: SparkSession, tmp_path: Path):
    rows = [("dense", Vectors.dense([1.0, 1e20])), ("sparse", Vectors.sparse(3, [1], [0.5])), ("null", None)]
    stream = Batches(spark, tmp_path / "rows", "k string")
    stream.add(*({"k": key} for key, _ in rows))
    vectors = spark.createDataFrame(
        rows, T.StructType([T.StructField("k", T.StringType()), T.StructField("v", VectorUDT())])
    )
    joined = stream.df.join(vectors, "k").withColumn("nested", F.array(F.struct("v", F.lit(1.0).alias("x"))))
    states = [
        StateDescriptor("vector", key="k", value="v"),
        StateDescriptor("nested", key="k", value="nested", order_by="v"),
        StateDescriptor("list", key="k", value="vs", kind="list"),
    ]
    writer = sparkis.queryable(
        joined.withColumn("vs", F.array_compact(F.array("v"))), *states, log=tmp_path / "log", mode="append"
    )
    start(writer, "vectors", tmp_path / "checkpoint")
    texts = {
        "dense": '{"type":1,"size":null,"indices":null,"values":[1,100000000000000000000]}',
        "sparse": '{"type":0,"size":3,"indices":[1],"values":[0.5]}',
        "null": "null",
    }
    with sparkis.read_snapshot(tmp_path / "log", "vectors") as snapshot:
        for key, text in texts.items():
            assert snapshot.value(f"vectors:vector:{key}".encode()) == (None if key == "null" else text.encode())
            assert snapshot.value(f"vectors:nested:{key}".encode()) == f'[{{"v":{text},"x":1}}]'.encode()
            assert (
                list(snapshot.list_elements(f"vectors:list:{key}".encode(), 0, 1)) == [text.encode()][: key != "null"]
            )


class Day(T.UserDefinedType):
    """A user-defined type that Spark stores as a date."""

    @classmethod
    def sqlType(cls) -> T.DataType:
        return T.StructType([T.StructField("day", T.DateType())])

    @classmethod
    def module(cls) -> str:
        return cls.__module__


def test_type_without_rewrite_or_json_is_refused(spark: SparkSession, tmp_path: Path):
    rows = Batches(spark, tmp_path / "rows", "k string").df
    days = rows.withColumn("v", F.struct(F.lit(None).cast(Day()).alias("day")))
    check_columns(days, StateDescriptor("s", "k", "v"), "q")
    with pytest.raises(DescriptorError, match=r"the value column 'v' .* and sparkis cannot write date in it"):
        check_columns(days, StateDescriptor("s", "k", "v", time_format="yyyy"), "q")
    places = rows.withColumn("v", F.expr("array(ST_GeomFromWKB(unhex(k)))"))
    with pytest.raises(DescriptorError, match=r"and sparkis cannot write geometry\(\d+\) in it"):
        check_columns(places, StateDescriptor("s", "k", "v"), "q")


def test_text_that_is_not_utf8_is_its_bytes_and_replaced_in_json(spark: SparkSession, tmp_path: Path):
    """Spark keeps such bytes, for example those of a Kafka value in Latin-1 that was cast to a string."""
    stream = Batches(spark, tmp_path / "rows", "hex string")
    stream.add({"hex": "E9"}, {"hex": "EDA08041"}, {"hex": "61"})
    text = F.unhex("hex").cast("string")
    rows = stream.df.select(text.alias("k"), F.struct(text.alias("t")).alias("nested"), F.array(text).alias("items"))
    states = [
        StateDescriptor("value", key="k", value="k"),
        StateDescriptor("hash", key="k", value=["k", "nested"]),
        StateDescriptor("object", key="k", value=["k", "items"], kind="value", encoding="json"),
        StateDescriptor("field", key_format="fields", field="k", value="k"),
        StateDescriptor("list", key="k", value="items", kind="list"),
        StateDescriptor("set", key_format="members", member="k"),
        StateDescriptor("newest", key="k", value="k", last_by="k"),
    ]
    writer = sparkis.queryable(rows, *states, log=tmp_path / "log", mode="append")
    start(writer, "q", tmp_path / "checkpoint")
    contents = {b"\xe9": "\ufffd", b"\xed\xa0\x80A": "\ufffdA", b"a": "a"}
    with sparkis.read_snapshot(tmp_path / "log", "q") as snapshot:
        for content, replaced in contents.items():
            assert snapshot.value(b"q:value:" + content) == content
            found = dict(snapshot.map_pairs(b"q:hash:" + content))
            assert (found[b"k"], json.loads(found[b"nested"])) == (content, {"t": replaced})
            assert json.loads(snapshot.value(b"q:object:" + content) or b"") == {"k": replaced, "items": [replaced]}
            assert list(snapshot.list_elements(b"q:list:" + content, 0, 1)) == [content]
            assert snapshot.value(b"q:newest:" + content) == content
        assert dict(snapshot.map_pairs(b"fields")) == {content: content for content in contents}
        assert set(snapshot.members(b"members")) == set(contents)
    table = sparkis.read_table(tmp_path / "log", "q", "value")
    assert sorted(table.column("k").to_pylist()) == sorted(contents.values())
    assert set(sparkis.read_table(tmp_path / "log", "q", "value", raw=True).column("k").to_pylist()) == set(contents)


def test_bytes_that_are_not_utf8_are_replaced_as_spark_replaces_them(spark: SparkSession):
    random = Random(SEED)
    parts = [
        b"a",
        b'"',
        b"\xc3\xa9",
        b"\xf0\x9f\x98\x80",
        b"\xed\xa0",
        b"\xed\xb0\x80",
        b"\xe0\x80",
        b"\xf4\x90",
        b"\xc0",
    ]
    parts += [bytes([byte]) for byte in (0x7F, 0x80, 0xBF, 0xC2, 0xE1, 0xE2, 0xF0, 0xF1, 0xF4, 0xF5, 0xFF)]
    contents = [b"".join(random.choices(parts, k=random.randrange(1, 7))) for _ in range(2000)]
    frame = spark.createDataFrame([(each,) for each in contents], "content binary")
    shown = frame.select(F.to_json(F.struct(F.col("content").cast("string").alias("t"))).alias("json")).collect()
    texts = pa.StructArray.from_arrays([any_text(pa.array(contents, pa.binary()))], ["t"])
    for content, ours, row in zip(contents, json_texts(texts).to_pylist(), shown, strict=True):
        assert ours == row.json, content
