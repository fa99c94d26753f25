"""The stores of one job on this machine's disk: `<folder>/<job>/<generation>.<n>`.

The newest store of a generation has the highest number. There are several only while one replaces another.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from state_backend.lmdb.store import LmdbStore
from state_backend.model.errors import StoreDamagedError, StoreError

# A store is rebuilt after so many reports of damage by readers that `verify` did not find.
DAMAGE_REPORTS_MAX = 2


class StoreFolder:
    """A job's folder of stores. Each store is verified when this process first opens it.

    Args:
        is_verified: Whether the process before has verified the first store that is opened.
    """

    def __init__(self, path: Path, map_bytes_max: int, *, is_verified: bool = False) -> None:
        self.path = path
        self._is_verified = is_verified
        self._map_bytes_max = map_bytes_max
        self._verified: Path | None = None  # the last store that this process verified or made
        self._damage_reports = 0  # reports by readers that `verify` did not confirm

    def stores(self) -> list[Path]:
        """Return the folders of all stores, sorted; none if the job has no folder yet."""
        return sorted(path for path in self.path.iterdir() if path.is_dir()) if self.path.is_dir() else []

    def newest(self, generation: str) -> Path:
        """Return the folder of a generation's newest store, whether or not it exists."""
        return self.path / f"{generation}.{max(self._serials(generation), default=0)}"

    def next(self, generation: str) -> Path:
        """Return the folder for a new store of a generation."""
        return self.path / f"{generation}.{max(self._serials(generation), default=0) + 1}"

    def _serials(self, generation: str) -> list[int]:
        if not self.path.is_dir():
            return []
        names = [name.rpartition(".") for name in os.listdir(self.path)]
        return [int(serial) for stem, _, serial in names if stem == generation and serial.isdigit()]

    def open(self, path: Path, generation: str) -> LmdbStore:
        """Open a store, or make an empty one. StoreDamagedError if the verification finds damage."""
        store = LmdbStore(path, generation, map_bytes_max=self._map_bytes_max)
        try:
            if path != self._verified and not self._is_verified and store.applied.epoch >= 0:
                store.verify()
        except StoreError:
            store.close()
            raise
        self._verified, self._damage_reports, self._is_verified = path, 0, False
        return store

    def verify_if_suspect(self, store: LmdbStore) -> None:
        """Verify a store if a reader found damage in it. StoreDamagedError also if its file is truncated."""
        store.check_length()
        if store.is_suspect:
            store.verify()
            self._damage_reports += 1
            if self._damage_reports >= DAMAGE_REPORTS_MAX:
                raise StoreDamagedError(
                    f"readers reported damage {DAMAGE_REPORTS_MAX} times that verification did not find"
                )
            store.clear_suspicion()

    def delete(self, path: Path) -> None:
        """Delete a store. The next store of its generation gets another folder."""
        stem, _, serial = path.name.rpartition(".")
        path.with_name(f"{stem}.{int(serial) + 1}").mkdir(parents=True, exist_ok=True)
        shutil.rmtree(path, ignore_errors=True)

    def delete_others(self, retained: Path) -> None:
        """Delete all stores but one."""
        for other in self.path.iterdir():
            if other != retained:
                shutil.rmtree(other, ignore_errors=True)
