"""The default store: one LMDB environment per job generation, read by any number of processes.

`lmdb.record_format` describes its tables and records. `lmdb.transaction` and `lmdb.expiry` write, `lmdb.snapshot`
reads. Each kind of state has a writer and a reader, such as `lmdb.map_writer` and `lmdb.map_reader`.

LMDB runs without fsync. The applied epoch is written in the same transaction as its changes, so a killed process loses
nothing. A crashed machine may lose writes, so a store from before the machine's last boot is deleted. Rows have
checksums (see `checksums`): reading a damaged row raises StoreDamagedError, and `verify` checks the full store. LMDB's
option `writemap` stays off: with it, a full disk ends the process with a signal instead of an error.
"""

from __future__ import annotations

import logging
import os
import shutil
import struct
from _thread import start_new_thread
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from errno import EDQUOT, EFBIG, EIO, ENOSPC
from functools import partial
from pathlib import Path
from secrets import token_hex

import lmdb

from state_backend import VERSION
from state_backend.lmdb.damage import as_damage, check_length, verify
from state_backend.lmdb.events import EVENTS, delete_event_batches
from state_backend.lmdb.expiry import ExpiryTransaction, has_expired, next_expiry_ms
from state_backend.lmdb.record_format import FORMAT, TABLES, Meta, Tables, read_meta
from state_backend.lmdb.slots import SlotsTransaction
from state_backend.lmdb.snapshot import LmdbSnapshot
from state_backend.lmdb.transaction import LmdbTransaction
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import StoreDamagedError, StoreError, StoreFullError
from state_backend.model.slot_set import ALL, SlotSet
from state_backend.native import pages_of
from state_backend.process_memory import available_bytes
from state_backend.store.key_events import EVENT_BATCH_BYTES, EVENTS_BYTES_MAX
from state_backend.store.slot_ownership import Loading, SlotOwnership
from state_backend.store.store import AppliedEpoch, EpochChanges, Store

logger = logging.getLogger("sparkis.applier")

# The size of LMDB's map: address space, not disk, because the file grows as it is written (guess).
MAP_BYTES_MAX = 1 << 40 if struct.calcsize("P") == 8 else 1 << 30
READERS_MAX = 512
DATA = "data.mdb"
# Readers that found damage create this file in a store's folder.
SUSPECT = "suspect"
# More than LMDB needs, which is a header and a cache line per reader. LMDB does not truncate a longer file.
LOCK_BYTES = 64 << 10
# The texts of errors of a full disk. EIO: LMDB's error for a short write, which a full disk causes.
DISK_FULL_TEXTS = tuple(map(os.strerror, (ENOSPC, EDQUOT, EFBIG, EIO)))


def _boot_id() -> str:
    """Return an id of the machine's last boot; empty if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


# Without a boot id, a store is trusted only by the process that made it: the machine may have crashed since.
THIS_PROCESS = f"process {token_hex(16)}"


def _boot_mark() -> str:
    """Return the content of the file `boot`: the store's format, the version that wrote it, and the boot's id."""
    return f"{FORMAT} {VERSION} {_boot_id() or THIS_PROCESS}"


def _reason_to_replace(mark: str) -> str | None:
    """Return why a store with a mark must be filled again; None if it can be used."""
    number, _, rest = mark.partition(" ")
    writer, _, boot = rest.partition(" ")
    if number != str(FORMAT):
        return f"sparkis {writer} wrote it in format {number}, and this one, sparkis {VERSION}, reads format {FORMAT}"
    if boot != (_boot_id() or THIS_PROCESS):
        return "it is from before the machine's last boot, which may have lost writes"
    return None


class LmdbStore(Store):
    """A store in a folder. One process opens it to write; others read it with `is_reader=True`.

    LMDB forbids to open one folder twice in a process: the writer's own readers use its `snapshot`.

    Args:
        as_of_ms: The clock reading of all snapshots, in a store of a past moment.
    """

    _file: int | None = None  # a descriptor of the data file

    def __init__(
        self,
        path: str | Path,
        generation: str,
        *,
        is_reader: bool = False,
        map_bytes_max: int = MAP_BYTES_MAX,
        as_of_ms: int | None = None,
    ) -> None:
        self.path = Path(path)
        self._as_of_ms = as_of_ms
        self.generation = generation
        self._map_bytes_max = map_bytes_max
        with self._translated_errors(lmdb.Error, OSError):
            self._env = self._open(readonly=True) if is_reader else self._open_to_write()
            try:
                is_new = not is_reader and not self._env.stat()["entries"]
                self.tables = self._open_tables(is_new, is_reader)
                self._file = os.open(self.path / DATA, os.O_RDONLY | os.O_CLOEXEC)
            except (lmdb.Error, OSError, StoreDamagedError):
                self._env.close()
                raise
        self._page_bytes = self._env.stat()["psize"]
        self._begin = partial(self._env.begin, self.tables.keys)
        # Whether epochs record events of keys (see `key_events`): set by the writer.
        self.records_events = False
        self.event_batch_bytes = EVENT_BATCH_BYTES
        self.events_bytes_max = EVENTS_BYTES_MAX
        self._pages = pages_of(self._env, self._file)
        self._used, self._used_at = (0, 0), -1  # `used_bytes`, and the id of the transaction that it was read in
        if is_reader:
            self._populate()
        else:
            self.clear_stale_readers()

    def _open_tables(self, is_new: bool, is_reader: bool) -> Tables:
        try:
            return Tables(*(self._env.open_db(name, create=is_new) for name in TABLES))
        except lmdb.NotFoundError as error:
            if is_reader:
                raise
            raise StoreDamagedError(f"a table is missing: {error}") from error

    def _populate(self) -> None:
        """Have the system map the file's pages, in a thread, up to half of the available memory."""
        if self._pages is not None:
            with suppress(RuntimeError):  # the interpreter ends
                start_new_thread(self._pages.populate, (available_bytes() // 2,))

    def _open_to_write(self) -> lmdb.Environment:
        """Open the folder; a store of another format, or from before the last boot, is replaced by an empty one."""
        boot = self.path / "boot"
        reason = _reason_to_replace(boot.read_text()) if boot.is_file() else "it is incomplete"
        if reason is None:
            self._allocate_lock_file()
            return self._open(readonly=False)
        if (self.path / DATA).exists():
            logger.info("the store %s is filled from the log again: %s", self.path, reason)
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        self._allocate_lock_file()
        env = self._open(readonly=False)
        boot.write_text(_boot_mark())
        return env

    def _allocate_lock_file(self) -> None:
        """Allocate the lock file's blocks: LMDB maps it, and a write to a missing block on a full disk is a SIGBUS."""
        lock = self.path / "lock.mdb"
        if not lock.exists():
            try:
                lock.write_bytes(bytes(LOCK_BYTES))
            except OSError:
                lock.unlink(missing_ok=True)
                raise

    def _open(self, *, readonly: bool) -> lmdb.Environment:
        check_length(self.path / DATA)
        return lmdb.open(
            str(self.path),
            map_size=self._map_bytes_max,
            max_dbs=len(TABLES),
            max_readers=READERS_MAX,
            readonly=readonly,
            sync=False,
            metasync=False,
            readahead=False,
        )

    @contextmanager
    def _translated_errors(self, *kinds: type[Exception]) -> Iterator[None]:
        try:
            yield
        except kinds as error:
            if (damage := as_damage(error)) is not None:
                raise damage from error
            if isinstance(error, (lmdb.MapFullError, lmdb.DiskError)) or any(
                text in str(error) for text in DISK_FULL_TEXTS
            ):
                raise StoreFullError(
                    f"the store {self.path} is full: {error}; free space on the disk, or raise the store's limit"
                ) from error
            raise StoreError(f"the store {self.path} cannot be used: {error}") from error

    def begin(self) -> lmdb.Transaction[bytes]:
        """Begin a read transaction on `keys`. Until it ends, LMDB does not reuse the pages of its version."""
        try:
            return self._begin()
        except lmdb.Error as error:
            raise as_damage(error) or StoreError(f"the store {self.path} cannot be read: {error}") from error

    @contextmanager
    def _write_transaction(self) -> Iterator[lmdb.Transaction[bytes]]:
        """Begin a write transaction, and commit it if the block ends without an error."""
        with self._translated_errors(lmdb.Error), self._env.begin(write=True, buffers=False) as txn:
            yield txn
        with self._translated_errors(OSError):
            self._extend_file()

    def _extend_file(self) -> None:
        """Extend the file to its last page: LMDB does not write the last pages if a transaction frees them again."""
        needed = (self._env.info()["last_pgno"] + 1) * self._page_bytes
        assert self._file is not None
        if os.fstat(self._file).st_size < needed:
            os.truncate(self.path / DATA, needed)

    def _meta(self, txn: lmdb.Transaction[bytes]) -> Meta:
        return read_meta(txn, self.tables, self.generation)

    @property
    def applied(self) -> AppliedEpoch:
        with self.begin() as txn:
            return self._meta(txn).applied

    @property
    def lineage(self) -> str:
        return self.path.name  # a store that is rebuilt has a new folder

    @property
    def slot_ownership(self) -> SlotOwnership:
        """The slots that are owned, loaded and removed."""
        with self.begin() as txn:
            return self._meta(txn).slot_ownership or SlotOwnership()

    def _changes(
        self, txn: lmdb.Transaction[bytes], meta: Meta, now_ms: int, slots: SlotSet | None = None
    ) -> ExpiryTransaction:
        """Return an object that makes the changes of a write transaction.

        Args:
            slots: The slots to change, if the store does not own all slots; default: the owned ones.
        """
        if meta.slot_ownership is None:
            return ExpiryTransaction(txn, self.tables, meta, now_ms)
        return SlotsTransaction(txn, self.tables, meta, now_ms, meta.slot_ownership.owned if slots is None else slots)

    def apply(self, epoch: EpochChanges, states: Sequence[StateDescriptor]) -> int:
        with self._write_transaction() as txn:
            changes = self._changes(txn, self._meta(txn), epoch.clock_ms)
            meta = changes.meta
            if self.records_events:
                changes.record_events(epoch.epoch, epoch.term, self.event_batch_bytes, self.events_bytes_max)
            self._apply(txn, changes, epoch, states)
            changes.store_changed_keys(epoch.epoch)
            meta.applied = replace(meta.applied, epoch=epoch.epoch, term=epoch.term, clock_ms=epoch.clock_ms)
            changes.finish()
            return changes.changed

    def _apply(
        self,
        txn: lmdb.Transaction[bytes],
        changes: LmdbTransaction,
        epoch: EpochChanges,
        states: Sequence[StateDescriptor],
    ) -> None:
        changes.declare(states, epoch.replaces)
        changes.apply_all(epoch.runs, self._pages if self._pages is not None and self._pages.learn(txn) else None)
        changes.delete_untouched()

    def expire(self, now_ms: int, removals_max: int) -> int:
        with self._env.begin() as txn:
            meta = self._meta(txn)
            clock_ms = removed_to_ms = meta.applied.clock_ms
            if meta.slot_ownership is not None and meta.slot_ownership.loading is not None:
                # Slots that are being loaded are at an earlier epoch: the next epochs may still change keys that expire
                # after its clock.
                removed_to_ms = min(clock_ms, meta.slot_ownership.loading.clock_ms)
            announced_to_ms = max(now_ms, clock_ms)
            if not has_expired(txn, self.tables, meta.announced, announced_to_ms, removed_to_ms):
                return 0
        with self._write_transaction() as txn:
            changes = self._changes(txn, meta, removed_to_ms, ALL)
            if self.records_events:
                applied = meta.applied
                changes.record_events(applied.epoch, applied.term, self.event_batch_bytes, self.events_bytes_max)
            done = changes.announce_expired(announced_to_ms, removals_max)
            changes.store_expired_keys()
            done += changes.remove_expired(removals_max - done)
            changes.finish()
            return done

    def next_expiry_ms(self) -> int | None:
        """Return when a key or field expires next, of those that `expire` has not announced; None: no other expires."""
        with self._env.begin() as txn:
            return next_expiry_ms(txn, self.tables, self._meta(txn).announced)

    def delete_events(self, batches_max: int) -> bool:
        """Delete up to `batches_max` batches of events; True if none remains."""
        with self._env.begin() as txn:
            if txn.get(EVENTS, db=self.tables.meta) is None:
                return True
        with self._write_transaction() as txn:
            return delete_event_batches(txn, self.tables.meta, batches_max)

    def own(self, desired: SlotSet) -> SlotOwnership:
        """Give up all slots that are not desired, and begin to load missing ones; return the new ownership.

        A store without an epoch owns the desired slots at once. The first time that a store of all slots gives up some,
        its keys are counted, which takes about a microsecond a key.
        """
        if self._toward(self.applied, self.slot_ownership, desired) == self.slot_ownership:
            return self.slot_ownership
        with self._write_transaction() as txn:
            meta = self._meta(txn)
            is_counted = meta.slot_ownership is not None
            before = meta.slot_ownership = meta.slot_ownership or SlotOwnership()
            changes = SlotsTransaction(txn, self.tables, meta, 0)
            if not is_counted:
                changes.count_all()
            meta.slot_ownership = self._toward(meta.applied, before, desired)
            changes.finish()
            return meta.slot_ownership

    @staticmethod
    def _toward(applied: AppliedEpoch, slot_ownership: SlotOwnership, desired: SlotSet) -> SlotOwnership:
        return SlotOwnership(desired) if applied.epoch < 0 else slot_ownership.toward(desired, applied.epoch)

    def load(self, batch: EpochChanges, states: Sequence[StateDescriptor], progress: Loading) -> int:
        """Apply a part of a snapshot or of an epoch to the slots that are being loaded, and record the progress.

        Returns about how many changes made a difference.

        Args:
            batch: Runs with rows of these slots only; all such runs if the epoch replaces states.
            progress: The progress after the batch. Slots that have reached the epoch of the owned ones are owned from
                then on.
        """
        with self._write_transaction() as txn:
            meta = self._meta(txn)
            ownership = meta.slot_ownership
            if ownership is None or ownership.loading is None or ownership.loading.slots != progress.slots:
                raise StoreError(f"the store {self.path} does not load the slots {progress.slots}")
            changes = SlotsTransaction(txn, self.tables, meta, batch.clock_ms, progress.slots)
            self._apply(txn, changes, batch, states)
            meta.slot_ownership = ownership.loaded(progress, meta.applied)
            changes.finish()
            return changes.changed

    def restart_loading(self) -> None:
        """Discard the progress of loading: the loaded keys are removed, and then `own` begins to load them again."""
        with self._write_transaction() as txn:
            meta = self._meta(txn)
            if meta.slot_ownership is not None:
                meta.slot_ownership = meta.slot_ownership.restart_loading()
                txn.put(b"applied", meta.to_bytes(), db=self.tables.meta)

    def remove_given_up(self, keys_max: int) -> bool:
        """Remove about `keys_max` keys of slots that were given up; False if there are none."""
        removing = self.slot_ownership.removing
        if not removing:
            return False
        with self._write_transaction() as txn:
            meta = self._meta(txn)
            assert meta.slot_ownership is not None
            changes = SlotsTransaction(txn, self.tables, meta, 0, removing)
            remaining = changes.remove_slots(keys_max)
            meta.slot_ownership = replace(meta.slot_ownership, removing=remaining)
            changes.finish()
            return True

    def snapshot(self, now_ms: int) -> LmdbSnapshot:
        # The compiled core counts times to live from now, so it reads no store of a past moment.
        file = self._file if self._as_of_ms is None else None
        return LmdbSnapshot(self.begin, self.tables, self.generation, now_ms, self._env, file, self._as_of_ms)

    def clear_stale_readers(self) -> int:
        """Free the reader slots of dead processes, because LMDB would never reuse their pages; return how many."""
        with self._translated_errors(lmdb.Error):
            return int(self._env.reader_check())

    def verify(self) -> None:
        """Check all rows, in about a second per million; StoreDamagedError for a damaged one (see `damage.verify`)."""
        self.check_length()
        with self._translated_errors(lmdb.Error), self._env.begin() as txn:
            verify(txn, self.tables)

    def check_length(self) -> None:
        """Raise StoreDamagedError for a truncated file: reading a missing page would end this process (SIGBUS)."""
        check_length(self.path / DATA)

    def suspect(self) -> None:
        """Ask the writer of the store to verify it: a reader found damage."""
        with suppress(OSError):
            (self.path / SUSPECT).touch()

    @property
    def is_suspect(self) -> bool:
        """Return whether a reader found damage since the store was last verified."""
        return (self.path / SUSPECT).exists()

    def clear_suspicion(self) -> None:
        """Mark the store as verified."""
        (self.path / SUSPECT).unlink(missing_ok=True)

    def used_bytes(self) -> tuple[int, int]:
        """Return the bytes of used and of free pages of the file."""
        with self._translated_errors(lmdb.Error), self._env.begin() as txn:
            if txn.id() != self._used_at:  # it was written to since the last call
                stats = [txn.stat(table) for table in self.tables]
                pages = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
                page_bytes = stats[0]["psize"]
                self._used = pages * page_bytes, (self._env.info()["last_pgno"] + 1 - pages) * page_bytes
                self._used_at = txn.id()
            return self._used

    def copy_to(self, path: Path) -> None:
        """Copy the store without its free pages. The folder appears when the copy is complete."""
        unfinished = path.with_name("copy")
        shutil.rmtree(unfinished, ignore_errors=True)
        with self._translated_errors(lmdb.Error, OSError):
            try:
                unfinished.mkdir()
                self._env.copy(str(unfinished), compact=True)
                (unfinished / "boot").write_text(_boot_mark())
                unfinished.rename(path)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)

    def close(self) -> None:
        self._env.close()
        self._close_file()

    def __del__(self) -> None:
        if self._file is not None:  # snapshots refer to the store, so there are none
            self.close()

    def _close_file(self) -> None:
        """Close the file's last descriptor in a thread.

        The system frees a removed file at that moment, which takes 150 ms per GB (measured). LMDB's own call does not
        release the interpreter's lock.
        """
        file, self._file = self._file, None
        if file is None:
            return
        try:
            start_new_thread(os.close, (file,))  # `Thread.start` would wait for ever at the interpreter's end
        except RuntimeError:  # the interpreter ends
            os.close(file)
