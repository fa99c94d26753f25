"""CONFIG REWRITE: writes changed settings into the configuration file, and keeps its comments and order."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile

import tomlkit
from tomlkit.exceptions import TOMLKitError

from resp_server.protocol.errors import GenericError


def rewrite(path: str, table: str, values: Mapping[str, str]) -> None:
    """Set keys of a table of a file. The file is replaced in one step, so no reader sees half of it.

    GenericError if the file cannot be read or written.
    """
    file = Path(path).resolve()
    try:
        text = rewritten(file.read_text(encoding="utf-8"), table, values)
        with NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, prefix=file.name, delete=False) as temporary:
            temporary.write(text)
            temporary.flush()
            os.fsync(temporary.fileno())
        os.chmod(temporary.name, file.stat().st_mode & 0o7777)
        os.replace(temporary.name, file)
    except (OSError, UnicodeDecodeError, TOMLKitError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise GenericError(f"Rewriting config file: {reason}") from None


def rewritten(text: str, table: str, values: Mapping[str, str]) -> str:
    """Return the text of a TOML file with the values of a table's keys replaced, or added."""
    document = tomlkit.parse(text)
    if table not in document:
        document[table] = tomlkit.table()
    for name, value in values.items():
        document[table][name] = _toml_value(value)
    return tomlkit.dumps(document)


def _toml_value(value: str) -> str | int | bool:
    if value in ("yes", "no"):
        return value == "yes"
    return int(value) if value.lstrip("-").isascii() and value.lstrip("-").isdecimal() else value
