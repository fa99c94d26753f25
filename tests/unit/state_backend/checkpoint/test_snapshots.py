"""RocksDB's snapshots: hostile and damaged zips and SST files are errors that name the file, and end nothing else."""

from __future__ import annotations

import io
import json
import random
import zipfile
from pathlib import Path

import pytest

from state_backend.checkpoint import snapshots
from state_backend.checkpoint.checkpoint import Checkpoint
from state_backend.checkpoint.files import CheckpointFiles
from state_backend.checkpoint.snapshots import read_snapshot
from state_backend.model.errors import CheckpointDamagedError, CheckpointError, PurgedVersionError
from tests.golden_checkpoints import NEWEST, unpack

JOB = "rocksdb-no-changelog"
ZIP = "state/0/1/5.zip"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return unpack(NEWEST, JOB, tmp_path / "checkpoint")


def rows(folder: Path) -> int:
    checkpoint = Checkpoint.at(str(folder))
    [store] = checkpoint.layout(4).stores
    return sum(batch.num_rows for _, batch in store.whole([1], 4))


def changed(content: bytes, *, name: str = "", body: bytes = b"", described: object = None) -> bytes:
    """Return a zip with a further member, or with other metadata."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for info in source.infolist():
            if info.filename == "metadata" and described is not None:
                archive.writestr("metadata", b"v1\n" + json.dumps(described).encode())
            else:
                archive.writestr(info.filename, source.read(info))
        if name:
            archive.writestr(name, body)
    return target.getvalue()


def sst(**fields: object) -> dict[str, object]:
    return {"sstFiles": [{"localFileName": "000008.sst", "dfsSstFileName": "x.sst", "sizeBytes": 1, **fields}]}


def test_a_zip_with_other_names_is_refused(folder: Path) -> None:
    content = (folder / ZIP).read_bytes()
    for name in ("../../evil", "/etc/passwd", "folder/CURRENT", "script.py"):
        (folder / ZIP).write_bytes(changed(content, name=name))
        with pytest.raises(CheckpointDamagedError, match="which Spark does not write"):
            rows(folder)


@pytest.mark.parametrize(
    "described",
    [
        [],
        {"sstFiles": 5},
        sst(localFileName="../x.sst"),
        sst(localFileName=7),
        sst(dfsSstFileName="../../../../etc/passwd"),
        sst(sizeBytes="many"),
    ],
)
def test_metadata_with_other_names_is_refused(folder: Path, described: object) -> None:
    (folder / ZIP).write_bytes(changed((folder / ZIP).read_bytes(), described=described))
    with pytest.raises(CheckpointDamagedError, match=r"5\.zip is damaged: its metadata"):
        rows(folder)


def test_a_member_that_unpacks_to_too_much_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "MEMBER_BYTES_MAX", 100_000)
    (folder / ZIP).write_bytes(changed((folder / ZIP).read_bytes(), name="000001.log", body=bytes(1_000_000)))
    with pytest.raises(CheckpointDamagedError, match="longer than 100000 bytes"):
        rows(folder)


def test_a_missing_or_changed_sst_file_is_an_error(folder: Path) -> None:
    [file] = read_snapshot(CheckpointFiles.at(str(folder)), "state/0/1", "5.zip").shared[:1]
    content = (folder / file.path).read_bytes()
    (folder / file.path).write_bytes(content + b"x")
    with pytest.raises(CheckpointDamagedError, match=r"\.sst is damaged: it has \d+ bytes"):
        rows(folder)
    (folder / file.path).unlink()
    with pytest.raises(PurgedVersionError, match=r"\.sst is gone"):
        rows(folder)


def test_flipped_bits_are_an_error_or_other_rows(folder: Path) -> None:
    expected = rows(folder)
    files = [folder / ZIP, *sorted((folder / "state/0/1/SSTs").iterdir())]
    chance = random.Random(JOB)
    for _ in range(12):
        path = chance.choice(files)
        content = path.read_bytes()
        flipped = bytearray(content)
        for _ in range(8):
            flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
        path.write_bytes(flipped)
        try:
            rows(folder)
        except CheckpointError as error:
            assert str(folder) in str(error)
        path.write_bytes(content)
    assert rows(folder) == expected
