"""Golden checkpoints: small checkpoints of several versions of Spark, and their rows as Spark's own reader shows them.

`scripts/golden_checkpoints.py` makes them, with each version of PySpark.
"""

from __future__ import annotations

import base64
import json
import lzma
import re
import tarfile
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from decimal import Decimal
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa

from state_backend.codec.column_text import readable_text

GOLDEN = Path(__file__).parent / "golden"
CASES = GOLDEN / "cases.tar.xz"
VERSIONS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
NEWEST = VERSIONS[-1]
DAY_TIME = re.compile(r"INTERVAL '(-?)(\d+) (\d+):(\d+):(\d+)(?:\.(\d+))?' DAY TO SECOND")
YEAR_MONTH = re.compile(r"INTERVAL '(-?)(\d+)-(\d+)' YEAR TO MONTH")
# Jobs whose state sparkis refuses to read, with the reason.
REFUSED = ("transform-avro",)
# Jobs whose rows this or another version of Spark cannot read: the same query with other settings of its store.
SAME_ROWS = {
    "rocksdb-no-changelog": "rocksdb-aggregation",
    "rocksdb-switched": "rocksdb-aggregation",
    "join3": "rocksdb-join",
    "join4": "rocksdb-join",
    "transform-no-changelog": "transform-snapshots",
    "transform-format2": "transform",
}
# The readers of these versions show only the first element of a list that replaces another one, among the changes of
# these jobs. Whole states have all elements. (The rows of `transform-ttl` differ in each run, and are shown in full.)
WITHOUT_LISTS = ("4.1.", "4.2.")
LISTS = ("transform", "transform-format2", "transform-snapshots")
# Spark 3.5 makes the watermark after the filters of a join's sides, newer versions make it before them. So in 3.5, rows
# leave the state later. The last batch as of which both states are the same.
LAST_BATCH_OF_35_JOINS = 3


def last_batch(version: str, job: str) -> int:
    """Return the last batch whose rows are as expected."""
    return LAST_BATCH_OF_35_JOINS if version.startswith("3.5") and job.endswith("-join") else 4


def jobs() -> Iterator[tuple[str, str]]:
    """Yield version and name of each golden checkpoint that sparkis reads."""
    for version in VERSIONS:
        for job in _files(version):
            if job not in REFUSED:
                yield version, job


def unpack(version: str, job: str, folder: Path) -> Path:
    """Write a checkpoint into a folder, and return the folder."""
    return _unpacked(_files(version)[job], folder)


def unpack_case(name: str, folder: Path) -> Path:
    """Write a checkpoint of a query that was no job of the script into a folder, and return the folder.

    dedupe-from-3.3: `dropDuplicates(["id"])` of the columns id, name, price; Spark 3.3.0 ran batch 0, 4.3.0 batch 1.
    aggregation-of-3.0, join-of-3.0: a count by `word`, and a join by `number`; Spark 3.0.3 ran batches 0 to 2.
    """
    return _unpacked(_archived(CASES)[name], folder)


def _unpacked(files: dict[str, bytes], folder: Path) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def expected(version: str, job: str) -> dict[str, Any]:
    """Return the rows of a job: of this version's reader, or of the newest version's, of the same job or its like."""
    for each in (version, NEWEST):
        for name in (job, SAME_ROWS.get(job, job)):
            found: dict[str, Any] = _rows(each).get(name, {})
            if found.get("changes"):
                has_lists = not (version.startswith(WITHOUT_LISTS) and name in LISTS)
                return found if has_lists else found | {"changes": expected(NEWEST, name)["changes"]}
    raise AssertionError(f"no version of Spark has read {job}")


def _files(version: str) -> dict[str, dict[str, bytes]]:
    """Return the files of each job's checkpoint."""
    return _archived(GOLDEN / version / "checkpoints.tar.xz")


@cache
def _archived(path: Path) -> dict[str, dict[str, bytes]]:
    found: dict[str, dict[str, bytes]] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            job, _, name = member.name.partition("/")
            content = archive.extractfile(member)
            assert content is not None
            found.setdefault(job, {})[name] = content.read()
    return found


@cache
def _rows(version: str) -> dict[str, Any]:
    path = GOLDEN / version / "rows.json.xz"
    found: dict[str, Any] = json.loads(lzma.decompress(path.read_bytes())) if path.exists() else {}
    return found


def plain(array: pa.Array) -> list[Any]:
    """Return an array as Python values; a struct as a tuple, because names of fields may repeat, a map as a dict.

    A text has U+FFFD in place of bytes that are not UTF-8, as in Spark's JSON.
    """
    kind = array.type
    if pa.types.is_struct(kind):
        children = [plain(array.field(index)) for index in range(kind.num_fields)]
        rows = list(zip(*children, strict=True)) if children else [()] * len(array)
    elif pa.types.is_list(kind):
        values = plain(array.values)
        offsets = array.offsets.to_pylist()
        rows = [values[start:end] for start, end in pairwise(offsets)]
    elif pa.types.is_map(kind):
        keys, items = plain(array.keys), plain(array.items)
        offsets = array.offsets.to_pylist()
        rows = [dict(zip(keys[start:end], items[start:end], strict=True)) for start, end in pairwise(offsets)]
    elif pa.types.is_time32(kind):  # of years and months
        return list(array.cast(pa.int32()).to_pylist())
    else:
        return list(readable_text(array).to_pylist())
    return [row if is_valid else None for row, is_valid in zip(rows, array.is_valid().to_pylist(), strict=True)]


def of_spark(given: Any, kind: pa.DataType) -> Any:
    """Return a value of Spark's JSON, with objects as lists of pairs, in the form of `plain`."""
    if given is None:
        return None
    if pa.types.is_struct(kind):
        return tuple(of_spark(value, kind.field(index).type) for index, (_, value) in enumerate(given))
    if pa.types.is_list(kind):
        return [of_spark(each, kind.value_type) for each in given]
    if pa.types.is_map(kind):
        return {key: of_spark(value, kind.item_type) for key, value in given}
    if pa.types.is_floating(kind):
        return float(given)
    if pa.types.is_decimal(kind):
        return Decimal(given)
    if pa.types.is_binary(kind):
        return base64.b64decode(given)
    if pa.types.is_date(kind):
        return date.fromisoformat(given)
    if pa.types.is_timestamp(kind):
        found = datetime.fromisoformat(given)
        return found.astimezone(ZoneInfo("UTC")) if kind.tz else found
    if pa.types.is_duration(kind):
        match = DAY_TIME.fullmatch(given)
        assert match is not None
        days, hours, minutes, seconds = (int(each) for each in match.groups()[1:5])
        found = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        return -found if match[1] else found
    if isinstance(given, str) and (match := YEAR_MONTH.fullmatch(given)):
        months = int(match[2]) * 12 + int(match[3])
        return -months if match[1] else months
    return given
