"""RocksDB's snapshots: hostile and damaged zips and SST files are errors that name the file, and end nothing else."""

from __future__ import annotations

import io
import json
import random
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from state_backend.checkpoint import snapshots
from state_backend.checkpoint.checkpoint import Checkpoint
from state_backend.checkpoint.files import CheckpointFiles
from state_backend.checkpoint.snapshots import read_snapshot_zip
from state_backend.model.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointFormatError,
    PurgedVersionError,
)
from tests.golden_checkpoints import NEWEST, plain, unpack

JOB = "rocksdb-no-changelog"
ZIP = "state/0/1/5.zip"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return unpack(NEWEST, JOB, tmp_path / "checkpoint")


def rows(folder: Path) -> int:
    checkpoint = Checkpoint.at(str(folder))
    [store] = checkpoint.batch_stores(4).stores
    return sum(batch.num_rows for _, batch in store.whole([1], 4))


def contents(folder: Path) -> list[list[Any]]:
    checkpoint = Checkpoint.at(str(folder))
    [store] = checkpoint.batch_stores(4).stores
    return [plain(batch.column(name)) for _, batch in store.whole([1], 4) for name in ("key", "value")]


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


def test_zip_with_other_names_is_refused(folder: Path) -> None:
    content = (folder / ZIP).read_bytes()
    for name in ("../../evil", "/etc/passwd", "folder/CURRENT", "script.py"):
        (folder / ZIP).write_bytes(changed(content, name=name))
        with pytest.raises(CheckpointFormatError, match="which sparkis does not know"):
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
    with pytest.raises(CheckpointFormatError, match=r"5\.zip cannot be read: its metadata"):
        rows(folder)


def test_members_that_unpack_to_too_much_together_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "MEMBERS_BYTES_MAX", 100_000)
    expected, content = rows(folder), (folder / ZIP).read_bytes()
    for number in range(3):
        content = changed(content, name=f"00000{number}.log", body=bytes(40_000))
        (folder / ZIP).write_bytes(content)
        if number == 0:
            assert rows(folder) == expected
    with pytest.raises(CheckpointFormatError, match="its members are longer than 100000 bytes"):
        rows(folder)


def test_too_many_members_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = (folder / ZIP).read_bytes()
    monkeypatch.setattr(snapshots, "MEMBERS_MAX", 3)
    with pytest.raises(CheckpointFormatError, match="more than 3 members"):
        rows(folder)
    monkeypatch.undo()
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for number in range(10_000):
            archive.writestr(f"{number:06}.log", b"")
    for hostile in (target.getvalue(), content[:-22] + bytes(20) + content[-22:], content + b"comment"):
        (folder / ZIP).write_bytes(hostile)
        with pytest.raises(CheckpointFormatError):
            rows(folder)
    (folder / ZIP).write_bytes(target.getvalue())
    with pytest.raises(CheckpointFormatError, match="its list of members is longer than 256000 bytes"):
        rows(folder)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_duplicate_member_is_refused(folder: Path) -> None:
    (folder / ZIP).write_bytes(changed((folder / ZIP).read_bytes(), name="CURRENT", body=b"MANIFEST-000001\n"))
    with pytest.raises(CheckpointFormatError, match="has a member twice"):
        rows(folder)


def test_list_of_members_in_form_of_large_zips_is_refused(folder: Path) -> None:
    content = (folder / ZIP).read_bytes()
    (folder / ZIP).write_bytes(content[:-22] + b"PK\x06\x07" + bytes(16) + content[-22:])
    with pytest.raises(CheckpointFormatError, match="its list of members is longer"):
        rows(folder)


def test_file_that_is_named_twice_is_refused(folder: Path) -> None:
    one = {"localFileName": "000008.sst", "dfsSstFileName": "x.sst", "sizeBytes": 1}
    for other in ({"dfsSstFileName": "y.sst"}, {"localFileName": "000009.sst"}):
        described = {"sstFiles": [one, {**one, **other}]}
        (folder / ZIP).write_bytes(changed((folder / ZIP).read_bytes(), described=described))
        with pytest.raises(CheckpointFormatError, match="names a file twice"):
            rows(folder)


def test_oversized_database_ends_only_its_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = rows(folder)
    monkeypatch.setattr(snapshots, "CHILD_BYTES_MAX", 100 << 20)
    with pytest.raises(CheckpointFormatError, match=r"5\.zip cannot be read: RocksDB cannot read it"):
        rows(folder)
    monkeypatch.undo()
    assert rows(folder) == expected


def output_of(script: str) -> bytes:
    return b"".join(snapshots.output_of([sys.executable, "-c", script], "5.zip"))


def test_errors_longer_than_pipe_buffer_do_not_block_output() -> None:
    complain = "import sys; sys.stderr.write('x' * (1 << 20)); sys.stderr.flush(); "
    assert output_of(complain + "sys.stdout.write('rows')") == b"rows"
    with pytest.raises(CheckpointFormatError, match="RocksDB cannot read it: the reason"):
        output_of(complain + "sys.exit('\\nthe reason')")


@pytest.mark.parametrize(
    ("command", "number"),
    [(["sh", "-c", "kill -9 $$"], 9), ([sys.executable, "-c", "raise KeyboardInterrupt"], 2)],
    ids=["killed", "Ctrl-C"],
)
def test_killed_process_is_no_format_error(command: list[str], number: int) -> None:
    with pytest.raises(CheckpointError, match=f"the process that reads it was killed by signal {number}") as raised:
        list(snapshots.output_of(command, "1.zip"))
    assert not isinstance(raised.value, CheckpointFormatError)


def test_silent_process_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "SILENCE_S_MAX", 0.1)
    with pytest.raises(CheckpointError, match=r"has been silent for 0\.1 s"):
        output_of("import threading; threading.Event().wait()")


def test_missing_or_changed_sst_file_is_error(folder: Path) -> None:
    [file] = read_snapshot_zip(CheckpointFiles.at(str(folder)), "state/0/1", "5.zip").shared[:1]
    content = (folder / file.path).read_bytes()
    (folder / file.path).write_bytes(content + b"x")
    with pytest.raises(CheckpointFormatError, match=r"\.sst cannot be read: it has \d+ bytes"):
        rows(folder)
    (folder / file.path).unlink()
    with pytest.raises(PurgedVersionError, match=r"\.sst is gone"):
        rows(folder)


def test_checksums_of_zip_and_of_rocksdb_that_do_not_match_are_damage(folder: Path) -> None:
    [file] = read_snapshot_zip(CheckpointFiles.at(str(folder)), "state/0/1", "5.zip").shared[:1]
    crc_at = (folder / ZIP).read_bytes().index(b"PK\x01\x02") + 16  # of the first member, in the list of members
    for path, at, message in ((folder / ZIP, crc_at, "Bad CRC-32"), (folder / file.path, 3, "checksum mismatch")):
        content = path.read_bytes()
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(CheckpointDamagedError, match=f"5.zip is damaged.*{message}.*on a new checkpoint"):
            rows(folder)
        path.write_bytes(content)


def test_flipped_bits_are_error_or_same_rows(folder: Path) -> None:
    """Also in a block that ends an iteration of RocksDB early."""
    expected = contents(folder)
    zip_file = read_snapshot_zip(CheckpointFiles.at(str(folder)), "state/0/1", "5.zip")
    chance = random.Random(JOB)
    for path in (folder / ZIP, *(folder / each.path for each in zip_file.shared)):
        content = path.read_bytes()
        for at in range(0, len(content), 128):
            flipped = bytearray(content)
            flipped[min(at + chance.randrange(128), len(content) - 1)] ^= 1 << chance.randrange(8)
            path.write_bytes(flipped)
            try:
                assert contents(folder) == expected, (path, at)
            except CheckpointError as error:
                assert str(folder) in str(error)
        path.write_bytes(content)
    assert contents(folder) == expected
