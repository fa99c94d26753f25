"""RocksDB's snapshots: the zip of a version, its SST files, and the pairs in it, read by a child process.

    N.zip, N_<id>.zip      MANIFEST-*, CURRENT, OPTIONS-*, *.log, and `metadata`: "v1" and a line of JSON
                           {"sstFiles": [{"localFileName", "dfsSstFileName", "sizeBytes"}], "logFiles": ..,
                            "columnFamilyMapping": {name: number}}
    SSTs/<dfsSstFileName>  data of RocksDB, shared by all zips that name it
    logs/<dfsLogFileName>  logs of RocksDB

RocksDB is C++ and trusts its files. So the files are checked and copied into a temporary folder, and a child process
opens them: damaged ones end the child, not this process.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from state_backend.checkpoint.files import CheckpointFiles
from state_backend.checkpoint.frames import damaged
from state_backend.checkpoint.records import Records, delta_records
from state_backend.model.errors import PurgedVersionError, UnsupportedStateError

EXTRA = "pip install 'sparkis[rocksdb]'"
# What RocksDB and Spark write into a zip: no folders, no other names.
MEMBER = re.compile(r"(MANIFEST-\d+|OPTIONS-\d+|CURRENT|IDENTITY|\d+\.log|metadata)")
LOCAL_NAME = re.compile(r"\d+\.(sst|log)")
REMOTE_NAME = re.compile(r"\w[\w.-]*")
# The files of a zip grow with the number of SST files, some hundred bytes for each.
MEMBER_BYTES_MAX = 1 << 28
READ_BYTES = 1 << 20


@dataclass(frozen=True)
class SharedFile:
    """A file of a snapshot that lies beside the zip: its folder and name, and its name for RocksDB."""

    folder: str
    name: str
    local_name: str
    size: int

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.name}"


@dataclass(frozen=True)
class Snapshot:
    """The zip of a version: its members, its shared files, and the numbers of its column families."""

    name: str
    members: dict[str, bytes]
    shared: tuple[SharedFile, ...]
    families: dict[str, int]


def read_snapshot(files: CheckpointFiles, folder: str, zip_name: str) -> Snapshot:
    """Return the snapshot in a zip of a store's folder."""
    path = f"{folder}/{zip_name}"
    name = files.name(path)
    content = files.buffer(path)
    if content is None:
        raise PurgedVersionError(f"{name} is gone: Spark has removed it")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = {info.filename: _member(archive, info, name) for info in archive.infolist()}
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, OSError, ValueError, zlib.error) as error:
        raise damaged(name, f"it is no zip file: {error}") from None
    described = members.pop("metadata", b"").split(b"\n")
    if len(described) < 2 or described[0] != b"v1":
        raise damaged(name, "its metadata is missing, or not of version 1")
    try:
        given = json.loads(described[1])
        shared = [
            SharedFile(
                f"{folder}/SSTs", str(each["dfsSstFileName"]), str(each["localFileName"]), int(each["sizeBytes"])
            )
            for each in given["sstFiles"]
        ] + [
            SharedFile(
                f"{folder}/logs", str(each["dfsLogFileName"]), str(each["localFileName"]), int(each["sizeBytes"])
            )
            for each in given.get("logFiles") or ()
        ]
        families = {str(family): int(number) for family, number in (given.get("columnFamilyMapping") or {}).items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise damaged(name, "its metadata is not what Spark writes") from None
    for each in shared:
        if not (LOCAL_NAME.fullmatch(each.local_name) and REMOTE_NAME.fullmatch(each.name)):
            raise damaged(name, f"its metadata names the file {each.name!r} for {each.local_name!r}")
    return Snapshot(name, members, tuple(shared), families)


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> bytes:
    if not MEMBER.fullmatch(info.filename):
        raise damaged(name, f"it contains {info.filename!r}, which Spark does not write")
    with archive.open(info) as member:
        content = member.read(MEMBER_BYTES_MAX + 1)
    if len(content) > MEMBER_BYTES_MAX:
        raise damaged(name, f"its member {info.filename} is longer than {MEMBER_BYTES_MAX} bytes")
    return content


def snapshot_records(files: CheckpointFiles, snapshot: Snapshot) -> Iterator[Records]:
    """Yield all pairs of a snapshot as puts. Needs the disk space of its files while it runs."""
    if find_spec("rocksdict") is None:
        raise UnsupportedStateError(f"{snapshot.name} is a snapshot of RocksDB, and to read it sparkis needs {EXTRA}")
    with tempfile.TemporaryDirectory(prefix="sparkis-rocksdb-") as scratch, _unpacked(files, snapshot, Path(scratch)):
        yield from delta_records(_pairs(scratch, snapshot.name), snapshot.name)


@contextmanager
def _unpacked(files: CheckpointFiles, snapshot: Snapshot, folder: Path) -> Iterator[None]:
    for member, content in snapshot.members.items():
        (folder / member).write_bytes(content)
    for each in snapshot.shared:
        shared = files.buffer(each.path)
        if shared is None:
            raise PurgedVersionError(f"{files.name(each.path)} is gone: Spark has removed it")
        if len(shared) != each.size:
            raise damaged(files.name(each.path), f"it has {len(shared)} bytes, and {snapshot.name} says {each.size}")
        target = folder / "archive" / each.local_name if each.local_name.endswith(".log") else folder / each.local_name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(shared)
    yield


def _pairs(folder: str, name: str) -> Iterator[bytes]:
    """Yield the output of the child process, which has the form of a delta file."""
    # -P: the modules beside the script are not importable by their names.
    command = [sys.executable, "-P", str(Path(__file__).with_name("rocksdb_process.py")), folder]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stderr is not None
        try:
            while part := os.read(child.stdout.fileno(), READ_BYTES):
                yield part
            reason = child.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
            if child.wait() != 0:
                raise damaged(name, f"RocksDB cannot read it: {reason or f'it ended with the code {child.returncode}'}")
        finally:
            child.kill()
