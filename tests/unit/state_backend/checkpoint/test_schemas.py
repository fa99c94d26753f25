"""Schema files: versions 1 to 3 are read, other ones are refused, damaged ones are an error."""

from __future__ import annotations

import json
import struct

import pyarrow as pa
import pytest

from state_backend.checkpoint.schemas import KeyEncoding, KeyForm, parse_store_schemas
from state_backend.checkpoint.spark_types import parse_schema
from state_backend.codec.column_text import YEAR_MONTH
from state_backend.model.errors import CheckpointFormatError, UnsupportedStateError


def spark_struct(**columns: object) -> str:
    fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in columns.items()]
    return json.dumps({"type": "struct", "fields": fields})


def text(content: str) -> bytes:
    return struct.pack(">H", len(content.encode())) + content.encode()


def texts(content: str, size: int = 7) -> bytes:
    chunks = [content[at : at + size] for at in range(0, len(content), size)]
    return struct.pack(">i", len(chunks)) + b"".join(map(text, chunks))


KEY, VALUE = spark_struct(word="string"), spark_struct(count="long", price="double")
KEY_TYPE = pa.struct([("word", pa.string())])
VALUE_TYPE = pa.struct([("count", pa.int64()), ("price", pa.float64())])
ENCODER = json.dumps({"keyStateEncoderType": "PrefixKeyScanStateEncoderSpec", "numColsPrefixKey": 1})
FAMILY = text("last") + b"\0\0" + texts(KEY) + b"\0\1" + texts(VALUE) + texts(ENCODER) + texts("{}")
FILES = {
    "v1": text("v1") + text(KEY) + text(VALUE),
    "v2": text("v2") + texts(KEY) + texts(VALUE),
    "v3": text("v3") + struct.pack(">i", 2) + FAMILY + FAMILY,
}


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_store_without_families_has_one_schema(version: str) -> None:
    [schema] = parse_store_schemas(FILES[version], "schema")
    assert (schema.family, schema.key, schema.value) == (None, KEY_TYPE, VALUE_TYPE)
    assert schema.encoding == KeyEncoding(KeyForm.WHOLE)
    [schema] = parse_store_schemas(FILES[version], "schema", prefix_columns=1)
    assert schema.encoding == KeyEncoding(KeyForm.PREFIX, 1)


def test_each_family_has_schema() -> None:
    schema, _ = parse_store_schemas(FILES["v3"], "schema")
    assert (schema.family, schema.key, schema.value) == ("last", KEY_TYPE, VALUE_TYPE)
    assert schema.encoding == KeyEncoding(KeyForm.PREFIX, 1)


@pytest.mark.parametrize("version", FILES)
def test_truncated_or_longer_file_is_error(version: str) -> None:
    for size in range(len(FILES[version])):
        with pytest.raises(CheckpointFormatError, match="schema cannot be read"):
            parse_store_schemas(FILES[version][:size], "schema")
    with pytest.raises(CheckpointFormatError, match="after its end"):
        parse_store_schemas(FILES[version] + b"x", "schema")


@pytest.mark.parametrize("version", FILES)
def test_most_flipped_bits_are_error(version: str) -> None:
    """Others change a name, or a word that is not read."""
    refused, bits = 0, 8 * len(FILES[version])
    for bit in range(bits):
        flipped = bytearray(FILES[version])
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            parse_store_schemas(bytes(flipped), "schema")
        except (CheckpointFormatError, UnsupportedStateError) as error:
            assert str(error).startswith("schema")
            refused += 1
    assert 0.8 * bits < refused < 0.9 * bits


def test_newer_version_and_unknown_encoder_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedStateError, match="'v4'"):
        parse_store_schemas(text("v4"), "schema")
    with pytest.raises(UnsupportedStateError, match="PrefixKeyScanStateEncoderSpeX"):
        parse_store_schemas(FILES["v3"].replace(b"Spec", b"SpeX"), "schema")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("varchar(10)", pa.string()),
        ("string collate UNICODE", pa.string()),
        ("decimal(38,18)", pa.decimal128(38, 18)),
        ("interval day to second", pa.duration("us")),
        ("interval year to month", YEAR_MONTH),
        ({"type": "udt", "class": "x", "sqlType": "long"}, pa.int64()),
        ({"type": "map", "keyType": "string", "valueType": "date"}, pa.map_(pa.string(), pa.date32())),
    ],
)
def test_types_of_spark_are_types_of_arrow(given: object, expected: pa.DataType) -> None:
    assert parse_schema(json.dumps(given), "schema") == expected


def test_unknown_type_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedStateError, match="'geography'"):
        parse_schema('"geography"', "schema")
    with pytest.raises(CheckpointFormatError):
        parse_schema("[" * 100_000, "schema")
    with pytest.raises(CheckpointFormatError):
        parse_schema('{"type":"array","elementType":' * 500 + '"long"' + "}" * 500, "schema")
