"""The small text files of a checkpoint: a version line, then lines of JSON.

metadata                                  {"id": the query's id}; no version line
offsets/<batch>                           v1, v2 | header | a line for each source; in v2 after its name and a colon
commits/<batch>                           v1, v2 | {"nextBatchWatermarkMs", "stateUniqueIds"}, may be missing
state/<operator>/_metadata/metadata       v1 | one operator
state/<operator>/_metadata/v2/<batch>     v2 | one operator, with the paths of its schemas
<store>/N.zip, member `metadata`          v1 | SST files and column families: see `snapshots`
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from state_backend.checkpoint.compression import unreadable
from state_backend.model.errors import UnsupportedStateError

Parsed = TypeVar("Parsed")
# Released versions write `stateSchemaFilePaths`.
PREVIEW_FIELD = "stateSchemaFilePath"


@dataclass(frozen=True)
class BatchOffsets:
    """The header of a batch's offsets: the watermark and the time of the batch, and its settings."""

    watermark_ms: int
    timestamp_ms: int
    settings: Mapping[str, str]


@dataclass(frozen=True)
class BatchCommit:
    """A batch's commit.

    Args:
        ids: The ids of the stores' files, by operator and partition; empty in format 1.
    """

    ids: Mapping[int, tuple[tuple[str, ...], ...]]


@dataclass(frozen=True)
class StoreInfo:
    """A store of an operator, as its metadata describes it.

    Args:
        schema_paths: The schema paths of v2; absolute, as the writer saw them.
    """

    name: str
    prefix_columns: int = 0
    schema_paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class OperatorInfo:
    """An operator, as its metadata describes it.

    Args:
        properties: The properties of transformWithState and newer joins.
    """

    number: int
    name: str
    stores: tuple[StoreInfo, ...]
    properties: Mapping[str, Any] = field(default_factory=dict)


def parse_query_id(content: bytes, name: str) -> str:
    """Return the query's id."""
    return _parsed(name, lambda: str(json.loads(content)["id"]))


def parse_offsets(content: bytes, name: str) -> BatchOffsets:
    """Return the header of a batch's offsets."""
    _, lines = _lines(content, name, ("v1", "v2"))

    def parse() -> BatchOffsets:
        header = json.loads(lines[0]) if lines and lines[0] else {}
        settings = {str(key): str(value) for key, value in header.get("conf", {}).items()}
        return BatchOffsets(int(header.get("batchWatermarkMs", 0)), int(header.get("batchTimestampMs", 0)), settings)

    return _parsed(name, parse)


def end_offsets(content: str) -> tuple[str, ...]:
    """Return the line of each source in a batch's offsets, for `log.source_offsets`; () if the version is not known.

    Of a source without data, v1 has the line `-`, and v2 has none. Spark writes v2 since 4.2, if all sources are named.
    """
    lines = content.splitlines()
    return tuple(lines[2:]) if lines and lines[0] in ("v1", "v2") else ()


def parse_commit(content: bytes, name: str) -> BatchCommit:
    """Return a batch's commit."""
    _, lines = _lines(content, name, ("v1", "v2"))

    def parse() -> BatchCommit:
        commit = json.loads(lines[0]) if lines and lines[0] else {}
        ids = {
            int(operator): tuple(tuple(str(store) for store in stores) for stores in partitions)
            for operator, partitions in (commit.get("stateUniqueIds") or {}).items()
        }
        return BatchCommit(ids)

    return _parsed(name, parse)


def parse_operator(content: bytes, name: str) -> OperatorInfo:
    """Return an operator's metadata, v1 or v2."""
    _, lines = _lines(content, name, ("v1", "v2"))
    if f'"{PREVIEW_FIELD}"' in lines[0]:
        raise UnsupportedStateError(
            f"{name} has the field {PREVIEW_FIELD}, which only builds of Spark before the release of 4.0.0 wrote, such "
            f"as its previews; sparkis reads checkpoints of released versions"
        )

    def parse() -> OperatorInfo:
        given = json.loads(lines[0])
        stores = tuple(
            StoreInfo(
                str(each["storeName"]),
                int(each.get("numColsPrefixKey", 0)),
                tuple(str(path) for path in each.get("stateSchemaFilePaths", ())),
            )
            for each in given["stateStoreInfo"]
        )
        properties = given.get("operatorPropertiesJson") or "{}"
        info = given["operatorInfo"]
        parsed = json.loads(properties)
        if not isinstance(parsed, dict):
            raise TypeError("properties are no object")
        return OperatorInfo(int(info["operatorId"]), str(info["operatorName"]), stores, parsed)

    return _parsed(name, parse)


def _lines(content: bytes, name: str, versions: tuple[str, ...]) -> tuple[str, list[str]]:
    """Return the version, and the lines after it."""
    try:
        version, *lines = content.decode().split("\n")
    except UnicodeDecodeError:
        raise unreadable(name, "it is not text") from None
    if version not in versions:
        if version.startswith("v") and version[1:].isdigit():
            raise UnsupportedStateError(f"{name} has the version {version}; sparkis reads {' and '.join(versions)}")
        raise unreadable(name, "its first line is no version")
    return version, lines


def _parsed(name: str, parse: Callable[[], Parsed]) -> Parsed:
    try:
        return parse()
    except (ArithmeticError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise unreadable(name, "it is in no form that sparkis knows") from None
