"""Which state owns a key, by the key formats of all states that were ever seen; persisted in a file.

A job that stopped, or was removed, keeps its keys: the upstream may still have old copies of them, and these must not
be answered again. So formats are added, and none is removed here. Removing a job from the file, while no proxy runs,
gives its keys back to the upstream.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path

from state_backend.model.descriptor import KeyFormat
from state_backend.model.errors import SparkisError

logger = logging.getLogger("sparkis.proxy")

VERSION = 1

# By job and state: each format that the state has had.
Formats = dict[str, dict[str, list[str]]]


class OwnershipError(Exception):
    """The file is not one of ownership, or cannot be read."""


class Ownership:
    """The owners of keys.

    is_known: the formats are complete enough to say that a key is the upstream's. Before that, no key may be answered.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Read the file, if there is one; OwnershipError. path: None: nothing is persisted."""
        self._path = path
        self._formats: Formats = {}
        self._pattern: re.Pattern[bytes] | None = None
        self._owners: list[str] = []
        self.is_known = False
        self.error = ""
        if path is not None and path.exists():
            self._formats = _read(path)
            self._compile()
            self.is_known = True

    @property
    def count(self) -> int:
        """The number of key formats."""
        return len(self._owners)

    def owner_of(self, key: bytes) -> str | None:
        """Return the state that owns a key, as `job:state`; None: the upstream owns it."""
        match = self._pattern.match(key) if self._pattern is not None else None
        return self._owners[match.lastindex - 1] if match and match.lastindex else None

    def learn(self, formats: Mapping[str, Mapping[str, str]]) -> None:
        """Add the key formats of jobs' states. New ones are written to the file before they count."""
        new = [
            (job, state, text)
            for job, states in formats.items()
            for state, text in states.items()
            if text not in self._formats.get(job, {}).get(state, ())
        ]
        if not new:
            return
        for job, state, text in new:
            KeyFormat.parse(text)  # raises before anything is changed
            logger.info("the keys %s belong to the state %s:%s from now on", text, job, state)
        for job, state, text in new:
            self._formats.setdefault(job, {}).setdefault(state, []).append(text)
        self._write()
        self._compile()

    def complete(self) -> None:
        """Declare the formats complete: all servers have reported their jobs."""
        if not self.is_known:
            self.is_known = True
            self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            with open(new, "w", encoding="utf-8") as file:
                json.dump({"version": VERSION, "jobs": self._formats}, file, indent=1, sort_keys=True)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self._path)
            self.error = ""
        except OSError as error:  # the keys are owned all the same; INFO and the log say that a restart forgets them
            self.error = str(error)
            logger.error("the owners of keys cannot be written to %s: %s", self._path, error)

    def _compile(self) -> None:
        rows = [
            (KeyFormat.parse(text), f"{job}:{state}")
            for job, states in self._formats.items()
            for state, texts in states.items()
            for text in texts
        ]
        # The longest literal start first: of two formats that cover a key, the more specific one names the owner.
        rows.sort(key=lambda row: -len(row[0].literals[0]))
        patterns = [b"(" + key_pattern(key_format) + b")" for key_format, _ in rows]
        self._pattern = re.compile(b"|".join(patterns), re.DOTALL) if patterns else None
        self._owners = [owner for _, owner in rows]


def key_pattern(key_format: KeyFormat) -> bytes:
    """Return a regular expression (bytes, DOTALL) for exactly the keys of a format, without groups.

    `KeyFormat.pattern` leaves out the literals between columns; here these would take keys of the upstream.
    """
    return b".*".join(re.escape(literal.encode()) for literal in key_format.literals) + rb"\Z"


def _read(path: Path) -> Formats:
    try:
        found = json.loads(path.read_text("utf-8"))
        if found["version"] != VERSION:
            raise OwnershipError(f"{path} is of version {found['version']!r}; this program reads version {VERSION}")
        formats: Formats = found["jobs"]
        for states in formats.values():
            for texts in states.values():
                for text in texts:
                    KeyFormat.parse(text)
        return formats
    except (OSError, ValueError, TypeError, LookupError, AttributeError, SparkisError) as error:
        raise OwnershipError(f"{path} is no file of key owners: {error}") from None
