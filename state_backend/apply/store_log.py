"""The log that filled a store: the file `log.json` in the store's folder, kept until the store is filled again.

    <store>/<job>/<generation>.<n>/log.json    {"format": 1, "sparkis": "0.1.0", "root": "/data/log", "id": "0b6f…", …}

`id` is the log's identity (see `log.identity`), `root` the path by which the log was read last. A log that has another
identity under the same path was begun anew, so its stores are filled again. A store of another log under another path
is a mistake, which is an error. A store of an older version has no such file, and gets one; older versions ignore it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from state_backend.log.checked_json import checked_object, with_checksum
from state_backend.log.filesystems import Filesystem, open_filesystem
from state_backend.log.identity import identity_of
from state_backend.model.errors import SparkisError, StoreError
from state_backend.model.formats import WRITER, check_format

LOG_FILE = "log.json"
FORMAT = 1


class StoreLog(NamedTuple):
    """A log that fills a store."""

    root: str
    id: str

    @classmethod
    def of_store(cls, store: Path) -> StoreLog | None:
        """Return the log that filled a store; None if it has no record of it. NewerFormatError."""
        try:
            content = checked_object((store / LOG_FILE).read_bytes(), needs_checksum=True)
        except (OSError, ValueError):
            return None
        check_format(content, FORMAT, str(store / LOG_FILE))
        return cls(str(content["root"]), str(content["id"]))

    @classmethod
    def of_log(cls, filesystem: Filesystem) -> StoreLog | None:
        """Return a log as its stores keep it; None: the log has no identity yet. LogError."""
        identity = identity_of(filesystem)
        return None if identity is None else cls(filesystem.root, identity)

    def write(self, store: Path) -> None:
        """Keep this log as the one that fills a store."""
        temporary = store / f"{LOG_FILE}.tmp"
        temporary.write_bytes(with_checksum({"format": FORMAT, **WRITER, **self._asdict()}))
        os.replace(temporary, store / LOG_FILE)

    def refusal(self, folder: Path, other: StoreLog) -> StoreError:
        """Return the error for a folder of stores that this log filled, and that is given for another log."""
        return StoreError(
            f"the store {folder} was filled from the log {self.root} (identity {self.id}), and is given for the log "
            f"{other.root} ({other.id}); give the server another --store, or the store's log"
        )


def claim_store(filesystem: Filesystem, store: Path, *, is_empty: bool) -> bool:
    """Make an empty store, or one that names no log, this log's; return whether the store is this log's.

    StoreError if another log, under another path, filled the store.
    """
    log, kept = StoreLog.of_log(filesystem), StoreLog.of_store(store)
    if log is None or log == kept:
        return True
    if kept is None or kept.id == log.id or is_empty:
        log.write(store)
        return True
    if kept.root != log.root:
        raise kept.refusal(store.parent.parent, log)
    return False


def check_stores(folder: Path, roots: Sequence[str]) -> None:
    """Raise StoreError if a folder has stores of other logs only.

    A log that cannot be read, or has no identity, may be any: then each job's applier finds out.
    """
    logs: list[StoreLog] = []
    for root in roots:
        found = None
        with suppress(SparkisError):
            found = StoreLog.of_log(open_filesystem(root))
        if found is None:
            return
        logs.append(found)
    kept = list(_logs_of_stores(folder))
    if kept and not any(one.root == each.root or one.id == each.id for one in kept for each in logs):
        raise kept[0].refusal(folder, logs[0])


def _logs_of_stores(folder: Path) -> Iterator[StoreLog]:
    for file in sorted(folder.glob(f"*/*/{LOG_FILE}")):
        with suppress(SparkisError):  # the applier raises it again
            if (found := StoreLog.of_store(file.parent)) is not None:
                yield found
