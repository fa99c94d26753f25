"""The schema files of state stores.

    v1, in <store>/_metadata/schema      text "v1" | text of the key's schema | text of the value's
    v2, in <store>/_metadata/schema      text "v2" | texts of the key's schema | texts of the value's
    v3, in _stateSchema/<store>/<batch>_<uuid>
                                         text "v3" | families i32, then for each:
                                         text name | key schema's id i16 | texts key | value schema's id i16
                                         | texts value | texts of the key's encoder | texts of a map's key, or {}

    text     bytes u16 | UTF-8
    texts    count i32 | that many texts: the pieces of one text
    encoder  {"keyStateEncoderType": name, "numColsPrefixKey": n} or {.., "orderingOrdinals": [column, ..]}

All numbers are big endian. A schema is the JSON of Spark's StructType.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum

import pyarrow as pa

from state_backend.checkpoint.compression import unreadable
from state_backend.checkpoint.spark_types import parse_struct
from state_backend.model.errors import UnsupportedStateError

# No file has more families, or pieces of one text.
COUNT_MAX = 100_000


class KeyForm(StrEnum):
    """How RocksDB's keys are made of a key row; the names are Spark's."""

    WHOLE = "NoPrefixKeyStateEncoderSpec"
    PREFIX = "PrefixKeyScanStateEncoderSpec"
    RANGE = "RangeKeyScanStateEncoderSpec"
    TIME_FIRST = "TimestampAsPrefixKeyStateEncoderSpec"
    TIME_LAST = "TimestampAsPostfixKeyStateEncoderSpec"


@dataclass(frozen=True)
class KeyEncoding:
    """The form of keys.

    Args:
        ordinals: The ordered columns of RANGE.
    """

    form: KeyForm = KeyForm.WHOLE
    prefix_columns: int = 0
    ordinals: tuple[int, ...] = ()


@dataclass(frozen=True)
class StoreSchema:
    """The rows of a store, or of one family of it: key, value, and how keys are encoded.

    Args:
        family: The column family in RocksDB; None if the store has none.
    """

    family: str | None
    key: pa.StructType
    value: pa.StructType
    encoding: KeyEncoding = KeyEncoding()


def parse_store_schemas(content: bytes, name: str, prefix_columns: int = 0) -> list[StoreSchema]:
    """Return the schemas in a schema file.

    Args:
        prefix_columns: The prefix columns of the store, as its operator's metadata says (v1, v2).
    """
    reader = _Reader(content, name)
    version = reader.text()
    if version not in ("v1", "v2", "v3"):
        raise UnsupportedStateError(f"{name} is a state schema of version {version!r}; sparkis reads v1, v2 and v3")
    if version == "v3":
        found = [_family(reader, name) for _ in range(reader.count())]
    else:
        read = reader.text if version == "v1" else reader.texts
        encoding = KeyEncoding(KeyForm.PREFIX, prefix_columns) if prefix_columns else KeyEncoding()
        found = [StoreSchema(None, parse_struct(read(), name), parse_struct(read(), name), encoding)]
    reader.finish()
    return found


def _family(reader: _Reader, name: str) -> StoreSchema:
    family = reader.text()
    reader.number(2)
    key = parse_struct(reader.texts(), name)
    reader.number(2)
    value = parse_struct(reader.texts(), name)
    encoding = _encoding(reader.texts(), name, family, len(key))
    reader.texts()  # a map's key is in the key's schema, too
    return StoreSchema(family, key, value, encoding)


def _encoding(text: str, name: str, family: str, columns: int) -> KeyEncoding:
    try:
        given = json.loads(text)
        form = given["keyStateEncoderType"]
        if form not in set(KeyForm):
            raise UnsupportedStateError(
                f"{name}: keys of {family!r} are encoded by {form!r}, which sparkis does not read"
            )
        ordinals = tuple(int(each) for each in given.get("orderingOrdinals", ()))
        found = KeyEncoding(KeyForm(form), int(given.get("numColsPrefixKey", 0)), ordinals)
    except (ArithmeticError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise unreadable(name, f"the encoding of the keys of {family!r} is in no form that sparkis knows") from None
    if not 0 <= found.prefix_columns <= columns or any(not 0 <= ordinal < columns for ordinal in ordinals):
        raise unreadable(name, f"the encoding of the keys of {family!r} names columns that are not there")
    return found


class _Reader:
    """Reads what Java's DataOutputStream writes."""

    def __init__(self, content: bytes, name: str) -> None:
        self._content = content
        self._name = name
        self._at = 0

    def number(self, size: int) -> int:
        return int.from_bytes(self._bytes(size), "big", signed=True)

    def count(self) -> int:
        found = self.number(4)
        if not 0 <= found <= COUNT_MAX:
            raise unreadable(self._name, f"it announces {found} parts")
        return found

    def text(self) -> str:
        size = int.from_bytes(self._bytes(2), "big")
        try:
            return self._bytes(size).decode()
        except UnicodeDecodeError:
            raise unreadable(self._name, "a text is not UTF-8") from None

    def texts(self) -> str:
        return "".join([self.text() for _ in range(self.count())])

    def finish(self) -> None:
        if self._at != len(self._content):
            raise unreadable(self._name, "there are bytes after its end")

    def _bytes(self, size: int) -> bytes:
        if len(self._content) - self._at < size:
            raise unreadable(self._name, "it is truncated")
        self._at += size
        return self._content[self._at - size : self._at]
