"""The storage of a change log, and of checkpoints: a folder, an object store, or HDFS, behind one interface.

`filesystem` has the interface; `open_filesystem` chooses by the address. What the files mean is not here. All paths are
relative to the root, with `/`. A failure of the storage is a LogUnavailableError; a missing file is no failure.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from state_backend.log.filesystems.filesystem import Filesystem
from state_backend.log.filesystems.local import LocalFilesystem
from state_backend.log.filesystems.object_store import ObjectStoreFilesystem
from state_backend.log_lines import hide_secrets
from state_backend.model.errors import LogUnavailableError

__all__ = ["Filesystem", "LocalFilesystem", "ObjectStoreFilesystem", "open_filesystem"]

EXTRA = "pip install 'sparkis[object-store]'"
# The schemes of object stores, and obstore's schemes for them. Hadoop's schemes for S3 are included.
OBJECT_STORES = {
    "s3": "s3",
    "s3a": "s3",
    "s3n": "s3",
    "gs": "gs",
    "abfs": "abfss",
    "abfss": "abfss",
    "az": "az",
}
HDFS = ("hdfs", "viewfs")
SUPPORTED = "a path, file:, s3://, gs://, abfss://, az:// or hdfs://"
# By scheme of an address that is not supported: what to write in its place.
REPLACEMENTS = {
    "dbfs": "write the store's own address, a volume (/Volumes/…), or /dbfs/… for the folder that Databricks mounts",
    "wasb": "write abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH: it is the same storage account",
    "wasbs": "write abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH: it is the same storage account",
    "gcs": "write gs://BUCKET/PATH",
    **dict.fromkeys(
        ("webhdfs", "swebhdfs"), "write hdfs://HOST/PATH, which needs libhdfs, or give a folder that mounts it"
    ),
}
LIBHDFS = "hdfs:// needs libhdfs, a JVM and the CLASSPATH of Hadoop, see docs/object-stores.md"


def open_filesystem(root: str | Path) -> Filesystem:
    """Return the filesystem for a log root: a path, or a URI of one of the schemes above."""
    text = str(root)
    shown = hide_secrets(text)
    scheme, rest = _split(text)
    if not scheme:
        return LocalFilesystem(text)
    if scheme == "file":  # file:/path, as Hadoop writes it, or file:///path
        return LocalFilesystem(unquote(urlsplit(text).path))
    if scheme in REPLACEMENTS:
        raise LogUnavailableError(f"cannot open the log {shown}: {scheme}: is not supported; {REPLACEMENTS[scheme]}")
    if scheme not in (*OBJECT_STORES, *HDFS):
        raise LogUnavailableError(
            f"cannot open the log {shown}: {scheme}: is not supported; give {SUPPORTED}. For a folder of this name, "
            f"write ./{text}"
        )
    if not re.match(r"//[^/]", rest) and not (scheme in HDFS and rest.startswith("///")):
        raise LogUnavailableError(
            f"cannot open the log {shown}: it names no bucket or host; write {scheme}://{rest.lstrip('/')}"
        )
    return _object_store(text, scheme, rest) if scheme in OBJECT_STORES else _hdfs(text)


def _split(text: str) -> tuple[str, str]:
    """Return the scheme, in lower case, and the rest after its colon; an empty scheme for a path.

    `name:/x` is never a path, because an address that lacks a slash must not make a folder. `name:x` is a path, unless
    the name is a known scheme.
    """
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):(.*)", text, re.DOTALL)
    if match is None:
        return "", text
    scheme, rest = match[1].lower(), match[2]
    is_uri = rest.startswith("/") or scheme in ("file", *OBJECT_STORES, *HDFS, *REPLACEMENTS)
    return (scheme, rest) if is_uri else ("", text)


def _object_store(text: str, scheme: str, rest: str) -> Filesystem:
    shown = hide_secrets(text)
    if "?" in rest or "#" in rest:
        raise LogUnavailableError(
            f"cannot open the log {shown}: an address has no options; set them as environment variables "
            f"(AWS_ENDPOINT_URL and the like, see docs/object-stores.md)"
        )
    if importlib.util.find_spec("obstore") is None:
        raise LogUnavailableError(f"cannot open the log {shown}: a log in an object store needs {EXTRA}")
    location = f"{OBJECT_STORES[scheme]}:{rest.rstrip('/')}"
    return ObjectStoreFilesystem(location, location)


def _hdfs(text: str) -> Filesystem:
    from pyarrow import ArrowInvalid
    from pyarrow.fs import FileSystem

    from state_backend.log.filesystems.arrow import ArrowFilesystem

    try:
        filesystem, base = FileSystem.from_uri(text)
    except (ArrowInvalid, OSError) as error:
        # The error of a missing library has a line for each place in which it was looked for.
        reason = str(error).partition("\n")[0]
        raise LogUnavailableError(f"cannot open the log {hide_secrets(text)}: {reason}; {LIBHDFS}") from error
    return ArrowFilesystem(filesystem, base, text)
