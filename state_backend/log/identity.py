"""The identity of a log: `<root>/log.json`, created once by its first writer, kept by copies, and never changed.

    {"format": 1, "sparkis": "0.1.0", "id": "0b6f…", "checksum": …}

A path can lead to another log than meant: an unmounted folder, a copy, a leftover. Its jobs may have the same names, so
whoever combines views of a log compares the identities. A log of an older version gets one from its next writer; older
readers ignore the file.
"""

from __future__ import annotations

import uuid

from state_backend.log.checked_json import checked_object, with_checksum
from state_backend.log.filesystems import Filesystem
from state_backend.model.errors import LogCorruptError
from state_backend.model.formats import WRITER, check_format

IDENTITY_FILE = "log.json"
FORMAT = 1


def identity_of(filesystem: Filesystem) -> str | None:
    """Return the id of a log; None if no writer has given it one. LogCorruptError, NewerFormatError."""
    stored = filesystem.read(IDENTITY_FILE)
    if stored is None:
        return None
    path = f"{filesystem.root}/{IDENTITY_FILE}"
    try:
        content = checked_object(stored, needs_checksum=True)
    except ValueError as damage:
        raise LogCorruptError(f"{path} {damage}; restore it from a copy of the log") from None
    check_format(content, FORMAT, path)
    return str(content["id"])


def ensure_identity(filesystem: Filesystem) -> str:
    """Return the id of a log, which gets one if it has none. Of several first writers, one gives it its id."""
    found = identity_of(filesystem)
    if found is None:
        filesystem.create(IDENTITY_FILE, with_checksum({"format": FORMAT, **WRITER, "id": uuid.uuid4().hex}, indent=1))
        found = identity_of(filesystem)
    if found is None:
        raise LogCorruptError(f"{filesystem.root}/{IDENTITY_FILE} was removed while a writer started; start it again")
    return found
