"""The formats of files on disk. A JSON file names its format, and the version of sparkis that wrote it:

    {"format": 4, "sparkis": "0.1.0", ...}

A program reads all formats up to its newest. It ignores fields that it does not know, so a format rises only for a
change that an older program would misread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from state_backend import VERSION
from state_backend.model.errors import NewerFormatError

WRITER = {"sparkis": VERSION}


def check_format(stored: Mapping[str, Any], newest: int, path: object) -> None:
    """Raise NewerFormatError for a file of a format above `newest`. A file without a format has the first one."""
    number, writer = stored.get("format", 1), stored.get("sparkis", "of a newer version")
    if isinstance(number, int) and number > newest:
        raise NewerFormatError(
            f"{path} has format {number}, which sparkis {writer} wrote; this one, sparkis {VERSION}, reads up to "
            f"format {newest}: upgrade it, or restore a copy from before the upgrade"
        )
