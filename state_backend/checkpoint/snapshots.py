"""RocksDB's snapshots: the zip of a version, its SST files, and the pairs in it, read by a child process.

    N.zip, N_<id>.zip      MANIFEST-*, CURRENT, OPTIONS-*, *.log, and `metadata`: "v1" and a line of JSON
                           {"sstFiles": [{"localFileName", "dfsSstFileName", "sizeBytes"}], "logFiles": ..,
                            "columnFamilyMapping": {name: number}}
    SSTs/<dfsSstFileName>  data of RocksDB, shared by all zips that name it
    logs/<dfsLogFileName>  logs of RocksDB

RocksDB is C++ and trusts its files. So the files are checked and copied into a temporary folder, and a child process
opens them, with a limit of its memory: damaged ones end the child, not this process.
"""

from __future__ import annotations

import io
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa

from state_backend.checkpoint.compression import damaged, unreadable
from state_backend.checkpoint.files import CheckpointFiles
from state_backend.checkpoint.records import Records, delta_records
from state_backend.model.errors import CheckpointError, PurgedVersionError, UnsupportedStateError

EXTRA = "pip install 'sparkis[rocksdb]'"
# What RocksDB and Spark write into a zip: no folders, no other names.
MEMBER = re.compile(r"(MANIFEST-\d+|OPTIONS-\d+|CURRENT|IDENTITY|\d+\.log|metadata)")
LOCAL_NAME = re.compile(r"\d+\.(sst|log)")
REMOTE_NAME = re.compile(r"\w[\w.-]*")
# RocksDB writes some ten members (guess: never a thousand). They grow with the number of SST files, by some hundred
# bytes for each, as does the metadata. A member is held in memory.
MEMBERS_MAX = 1000
MEMBERS_BYTES_MAX = 1 << 28
METADATA_BYTES_MAX = 1 << 25
# The list of members at the end of a zip, which `zipfile` reads as a whole: an entry has 46 bytes and its name.
DIRECTORY_BYTES_MAX = MEMBERS_MAX * 256
# PK 5 6 | disks u16 u16 | members u16 u16 | bytes of the list u32 | its place u32 | bytes of the comment u16
END_OF_ZIP = struct.Struct("<4sHHHHIIH")
END_MAGIC, LOCATOR_OF_ZIP64, LOCATOR_BYTES = b"PK\x05\x06", b"PK\x06\x07", 20
READ_BYTES = 1 << 20
# The child process: its address space beside that for the files, the longest time without output, and the end of its
# standard error that is kept (guesses; an open database has some hundred MB, most of them reserved only).
CHILD_BYTES_MAX = 4 << 30
SILENCE_S_MAX = 300.0
ERROR_BYTES_MAX = 1 << 14
# The beginning of the error that `zipfile` raises for a wrong checksum, and a part of RocksDB's error for one.
WRONG_CRC, WRONG_CHECKSUM = "Bad CRC-32", "checksum mismatch"
# A process that others end, such as the kernel without memory or Ctrl-C in a shell, tells nothing of the files.
KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


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
class SnapshotZip:
    """The zip of a version: its members, its shared files, and the numbers of its column families."""

    name: str
    members: dict[str, bytes]
    shared: tuple[SharedFile, ...]
    families: dict[str, int]


def read_snapshot_zip(files: CheckpointFiles, folder: str, zip_name: str) -> SnapshotZip:
    """Return the snapshot in a zip of a store's folder."""
    path = f"{folder}/{zip_name}"
    name = files.name(path)
    content = files.buffer(path)
    if content is None:
        raise PurgedVersionError(f"{name} is gone: Spark has removed it")
    try:
        _check_directory(content, name)
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = _members(archive, name)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, OSError, ValueError, zlib.error) as error:
        failed = damaged if str(error).startswith(WRONG_CRC) else unreadable
        raise failed(name, f"it is not a complete zip file: {error}") from None
    described = members.pop("metadata", b"").split(b"\n")
    if len(described) < 2 or described[0] != b"v1":
        raise unreadable(name, "its metadata is missing, or not of version 1")
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
    except (ArithmeticError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise unreadable(name, "its metadata is in no form that sparkis knows") from None
    for each in shared:
        if not (LOCAL_NAME.fullmatch(each.local_name) and REMOTE_NAME.fullmatch(each.name)):
            raise unreadable(name, f"its metadata names the file {each.name!r} for {each.local_name!r}")
    # Each copy of a file takes disk space.
    for names in ([each.path for each in shared], [each.local_name for each in shared]):
        if len(set(names)) != len(names):
            raise unreadable(name, "its metadata names a file twice")
    return SnapshotZip(name, members, tuple(shared), families)


def _check_directory(content: pa.Buffer, name: str) -> None:
    """Raise CheckpointFormatError if the list of a zip's members is too long to be read."""
    end = bytes(content[max(0, len(content) - END_OF_ZIP.size - LOCATOR_BYTES) :])
    magic, *_, size, _, _ = END_OF_ZIP.unpack(end[-END_OF_ZIP.size :].rjust(END_OF_ZIP.size))
    if magic != END_MAGIC:
        raise unreadable(name, "it is no zip file: it does not end as one without a comment")
    if size > DIRECTORY_BYTES_MAX or end.startswith(LOCATOR_OF_ZIP64):
        raise unreadable(name, f"its list of members is longer than {DIRECTORY_BYTES_MAX} bytes")


def _members(archive: zipfile.ZipFile, name: str) -> dict[str, bytes]:
    members: dict[str, bytes] = {}
    remaining = MEMBERS_BYTES_MAX
    for count, info in enumerate(archive.infolist(), 1):
        if not MEMBER.fullmatch(info.filename):
            raise unreadable(name, f"it contains {info.filename!r}, which sparkis does not know")
        if count > MEMBERS_MAX or info.filename in members:
            raise unreadable(name, f"it has a member twice, or more than {MEMBERS_MAX} members")
        allowed = min(remaining, METADATA_BYTES_MAX) if info.filename == "metadata" else remaining
        with archive.open(info) as member:
            content = member.read(allowed + 1)
        if len(content) > allowed:
            raise unreadable(
                name, f"its members are longer than {MEMBERS_BYTES_MAX} bytes, or its metadata is too long"
            )
        remaining -= len(content)
        members[info.filename] = content
    return members


def snapshot_records(files: CheckpointFiles, snapshot: SnapshotZip) -> Iterator[Records]:
    """Yield all pairs of a snapshot as puts. Needs the disk space of its files while it runs."""
    if find_spec("rocksdict") is None:
        raise UnsupportedStateError(f"{snapshot.name} is a snapshot of RocksDB, and to read it sparkis needs {EXTRA}")
    with tempfile.TemporaryDirectory(prefix="sparkis-rocksdb-") as scratch, _unpacked(files, snapshot, Path(scratch)):
        yield from delta_records(_pairs(scratch, snapshot), snapshot.name)


@contextmanager
def _unpacked(files: CheckpointFiles, snapshot: SnapshotZip, folder: Path) -> Iterator[None]:
    for member, content in snapshot.members.items():
        (folder / member).write_bytes(content)
    for each in snapshot.shared:
        shared = files.buffer(each.path)
        if shared is None:
            raise PurgedVersionError(f"{files.name(each.path)} is gone: Spark has removed it")
        if len(shared) != each.size:
            raise unreadable(files.name(each.path), f"it has {len(shared)} bytes, and {snapshot.name} says {each.size}")
        target = folder / "archive" / each.local_name if each.local_name.endswith(".log") else folder / each.local_name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(shared)
    yield


def _pairs(folder: str, snapshot: SnapshotZip) -> Iterator[bytes]:
    """Yield the output of the child process, which has the form of a delta file."""
    # -P: the modules beside the script are not importable by their names.
    script = str(Path(__file__).with_name("rocksdb_process.py"))
    memory = CHILD_BYTES_MAX + sum(each.size for each in snapshot.shared)
    return output_of([sys.executable, "-P", script, folder, str(memory)], snapshot.name)


def output_of(command: Sequence[str], name: str) -> Iterator[bytes]:
    """Yield a process' standard output; CheckpointFormatError with its reason if it fails.

    It may be silent for SILENCE_S_MAX. The time in which the caller does something else does not count.
    """
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stderr is not None
        out, err = child.stdout.fileno(), child.stderr.fileno()
        open_ones, complaint = [out, err], b""
        try:
            while open_ones:
                # Both are read: a process whose full standard error nobody reads would wait for ever.
                readable = select.select(open_ones, [], [], SILENCE_S_MAX)[0]
                if not readable:
                    raise CheckpointError(f"{name}: the process that reads it has been silent for {SILENCE_S_MAX:g} s")
                for each in readable:
                    part = os.read(each, READ_BYTES)
                    if not part:
                        open_ones.remove(each)
                    elif each == err:
                        complaint = (complaint + part)[-ERROR_BYTES_MAX:]
                    else:
                        yield part
            reason = complaint.decode(errors="replace").strip().rpartition("\n")[2]
            if -child.wait() in KILLS:
                raise CheckpointError(f"{name}: the process that reads it was killed by signal {-child.returncode}")
            if child.returncode != 0:
                failed = damaged if WRONG_CHECKSUM in reason else unreadable
                raise failed(name, f"RocksDB cannot read it: {reason or f'it ended with the code {child.returncode}'}")
        finally:
            child.kill()
