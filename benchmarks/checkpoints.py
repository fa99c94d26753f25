"""Checkpoints as Spark writes them, of any size, made without Spark: an aggregation in the HDFS-backed provider.

groupBy("sensor").agg(count("*"), sum("temperature"), max("time")), with keys such as `sensor-00001234`
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from state_backend.checkpoint.compression import LZ4, LZ4_COMPRESSED, LZ4_HEADER, LZ4_SEED, LZ4_STORED
from state_backend.checkpoint.hashes import xxhash32

# Spark's default (spark.io.compression.lz4.blockSize).
BLOCK_BYTES = 32 << 10
# Rows are made in parts of this number, so that ten million need little memory.
PART_ROWS = 1 << 18
BATCH_TIME_MS = 1_760_000_000_000
NAME_BYTES = 15
RECORD = np.dtype(
    [
        ("key_bytes", ">i4"),
        ("key_nulls", "<i8"),
        ("key_word", "<i8"),
        ("key_text", "S16"),
        ("value_bytes", ">i4"),
        ("value_nulls", "<i8"),
        ("count", "<i8"),
        ("sum", "<f8"),
        ("max", "<i8"),
    ]
)
END = struct.pack(">i", -1)
KEY_BYTES, VALUE_BYTES = 32, 32
OPERATOR = {
    "operatorInfo": {"operatorId": 0, "operatorName": "stateStoreSave"},
    "stateStoreInfo": [{"storeName": "default", "numColsPrefixKey": 0}],
}


class WrittenCheckpoint:
    """A checkpoint whose batches a benchmark writes and commits."""

    def __init__(self, folder: Path, partitions: int) -> None:
        self.folder = folder
        self._partitions = partitions
        self._codec = pa.Codec("lz4_raw")
        for name in ("offsets", "commits", "state/0/_metadata", "state/0/0/_metadata"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for partition in range(1, partitions):
            (folder / f"state/0/{partition}").mkdir(exist_ok=True)
        (folder / "metadata").write_text(json.dumps({"id": "7a6e8c52-91c2-4b12-9d0e-2f0b6d1e3c11"}))
        (folder / "state/0/_metadata/metadata").write_text("v1\n" + json.dumps(OPERATOR))
        (folder / "state/0/0/_metadata/schema").write_bytes(_schema())

    def write_snapshot(self, batch: int, keys: int) -> None:
        """Write the whole state after a batch: keys 0, 1, ... in a random order."""
        chance = np.random.default_rng(batch)
        for partition in range(self._partitions):
            numbers = chance.permutation(np.arange(partition, keys, self._partitions))
            self._write(f"state/0/{partition}/{batch + 1}.snapshot", numbers, batch)

    def write_changes(self, batch: int, numbers: npt.NDArray[np.int64], value: int | None = None) -> None:
        """Write the changes of a batch: new values of some keys. value: their counts, if not the batch's number + 1."""
        for partition in range(self._partitions):
            self.write_partition(batch, partition, numbers, value)

    def write_partition(
        self, batch: int, partition: int, numbers: npt.NDArray[np.int64], value: int | None = None
    ) -> None:
        """Write the changes of a batch in one partition, as one task does."""
        chosen = numbers[numbers % self._partitions == partition]
        self._write(f"state/0/{partition}/{batch + 1}.delta", chosen, batch if value is None else value - 1)

    def plan(self, batch: int, settings: Mapping[str, str] | None = None) -> None:
        """Write a batch's offsets, as Spark does before it runs the batch."""
        header = {
            "batchWatermarkMs": 0,
            "batchTimestampMs": BATCH_TIME_MS + 1000 * batch,
            "conf": {"spark.sql.shuffle.partitions": str(self._partitions), **(settings or {})},
        }
        self._appear(self.folder / f"offsets/{batch}", f"v1\n{json.dumps(header)}\n{batch}".encode())

    def commit(self, batch: int) -> None:
        """Write a batch's commit: it counts from then on."""
        self._appear(self.folder / f"commits/{batch}", b'v1\n{"nextBatchWatermarkMs":0}')

    @staticmethod
    def _appear(path: Path, content: bytes) -> None:
        unfinished = path.with_name(f".{path.name}.tmp")
        unfinished.write_bytes(content)
        unfinished.rename(path)

    def _write(self, path: str, numbers: npt.NDArray[np.int64], batch: int) -> None:
        """Write a file of the state; it gets its name when it is complete."""
        unfinished = (self.folder / path).with_suffix(".tmp")
        with open(unfinished, "wb") as file:
            rest = b""
            for start in range(0, len(numbers), PART_ROWS):
                content = rest + _records(numbers[start : start + PART_ROWS], batch)
                whole = len(content) // BLOCK_BYTES * BLOCK_BYTES
                for at in range(0, whole, BLOCK_BYTES):
                    file.write(self._block(content[at : at + BLOCK_BYTES]))
                rest = content[whole:]
            file.write(self._block(rest + END))
            file.write(LZ4_HEADER.pack(LZ4, LZ4_STORED, 0, 0, 0))
        unfinished.rename(self.folder / path)

    def _block(self, content: bytes) -> bytes:
        packed = self._codec.compress(content, asbytes=True)
        is_smaller = len(packed) < len(content)
        token, data = (LZ4_COMPRESSED, packed) if is_smaller else (LZ4_STORED, content)
        checksum = xxhash32(content, LZ4_SEED) & 0x0FFFFFFF
        return LZ4_HEADER.pack(LZ4, token, len(data), len(content), checksum) + data


def key_of(number: int) -> str:
    """Return the text of a key."""
    return f"sensor-{number:08d}"


def _records(numbers: npt.NDArray[np.int64], batch: int) -> bytes:
    records = np.zeros(len(numbers), RECORD)
    digits = numbers[:, None] // 10 ** np.arange(7, -1, -1) % 10 + ord("0")
    texts = np.zeros((len(numbers), 16), np.uint8)
    texts[:, :7] = np.frombuffer(b"sensor-", np.uint8)
    texts[:, 7:NAME_BYTES] = digits
    records["key_bytes"], records["value_bytes"] = KEY_BYTES, VALUE_BYTES
    records["key_word"] = 16 << 32 | NAME_BYTES
    records["key_text"] = texts.view("S16")[:, 0]
    records["count"] = batch + 1
    records["sum"] = (numbers % 1000) / 8 * (batch + 1)
    records["max"] = BATCH_TIME_MS + 1000 * batch
    return records.tobytes()


def _schema() -> bytes:
    """Return the file of the schema, version 2."""

    def chunked(kinds: dict[str, str]) -> bytes:
        fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in kinds.items()]
        text = json.dumps({"type": "struct", "fields": fields}).encode()
        return struct.pack(">iH", 1, len(text)) + text

    value = {"count": "long", "sum": "double", "max": "long"}
    return struct.pack(">H", 2) + b"v2" + chunked({"sensor": "string"}) + chunked(value)
