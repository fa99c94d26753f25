"""Where a change log lies: the few file operations it needs, atomic and durable, once per kind of filesystem.

`create` and `open_new` never overwrite: of two writers of one name one wins, and nobody sees half a file. `replace`
overwrites as a whole. Both are on the disk when they return. (Seen: pyarrow's own `open_output_stream` and `move`
overwrite silently, so they are not used for this on a local disk.)

    LocalFilesystem   a folder of this machine, or one mounted on all of them
    ArrowFilesystem   any other filesystem that pyarrow knows by a URI: s3://, gs://, hdfs:// ...; one PUT is atomic
                      there, but pyarrow has no conditional PUT: `create` looks first, and the writer's term (see
                      `change_log`) is what keeps two writers apart

All paths are relative to the log's root, with `/`. An OSError becomes LogUnavailableError; a missing file does not.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.fs

from state_backend.errors import LogUnavailableError
from state_backend.filesystems.arrow import ArrowFilesystem
from state_backend.filesystems.filesystem import Filesystem
from state_backend.filesystems.local import LocalFilesystem

__all__ = ["ArrowFilesystem", "Filesystem", "LocalFilesystem", "open_filesystem"]


def open_filesystem(root: str | Path) -> Filesystem:
    """Return the filesystem for a log root: a path, a file:// URI, or any URI that pyarrow knows."""
    text = str(root)
    if text.startswith("file:"):  # file:/path, as Hadoop writes it, or file:///path
        return LocalFilesystem(unquote(urlsplit(text).path))
    if "://" not in text:
        return LocalFilesystem(text)
    try:
        filesystem, base = pyarrow.fs.FileSystem.from_uri(text)
    except (pa.ArrowInvalid, OSError) as error:
        raise LogUnavailableError(f"cannot open the log {text}: {error}") from error
    return ArrowFilesystem(filesystem, base, text)
