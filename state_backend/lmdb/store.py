"""The default store: one LMDB environment per job generation, read by any number of processes.

What lies in it is described in `lmdb.layout`; `lmdb.transaction` and `lmdb.expiry` write, `lmdb.snapshot`
reads; for each kind of state they have a writer and a reader, such as `lmdb.map_writer` and `lmdb.map_reader`.

LMDB runs without fsync: the applied epoch is written in the same transaction as its changes, so that a killed process
loses nothing; a machine that crashed may, so a store made before the machine's last boot is thrown away. Rows have
checksums (see `checksums`), and what reads them raises StoreDamagedError; `verify` looks at all of a store.
Writemap stays off: with it a full disk is a signal that ends the process, not an error.
"""

from __future__ import annotations

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

from state_backend.lmdb.damage import check_length, of_damage, verify
from state_backend.lmdb.events import EVENTS, forget
from state_backend.lmdb.expiry import ExpiryTransaction, has_expired
from state_backend.lmdb.layout import FORMAT, TABLES, Meta, Tables, read_meta
from state_backend.lmdb.slots import SlotsTransaction
from state_backend.lmdb.snapshot import LmdbSnapshot
from state_backend.lmdb.transaction import LmdbTransaction
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import StoreDamagedError, StoreError, StoreFullError
from state_backend.model.key_groups import ALL, KeyGroups
from state_backend.native import pages_of
from state_backend.process_memory import available_bytes
from state_backend.store.key_events import KEPT_BYTES_MAX, PORTION_BYTES
from state_backend.store.slot_ownership import Loading, SlotOwnership
from state_backend.store.store import Applied, EpochChanges, Store

# Address space, not disk: the file grows as it is written (guess; a state server holds a part of a job).
MAP_BYTES_MAX = 1 << 40 if struct.calcsize("P") == 8 else 1 << 30
READERS_MAX = 512
DATA = "data.mdb"
# A file that readers leave in a store's folder.
SUSPECT = "suspect"
# Beyond what LMDB asks for: a cache line per reader, and a header. LMDB takes a longer file as it is.
LOCK_BYTES = 64 << 10
# EIO: what LMDB makes of a write that was cut short, and that is how a disk fills up.
NO_ROOM = tuple(map(os.strerror, (ENOSPC, EDQUOT, EFBIG, EIO)))


def _boot_id() -> str:
    """Return what differs after each boot of the machine; empty where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


# Where the system does not tell one boot from another, a store that was not synced is trusted by one process alone.
THIS_PROCESS = f"process {token_hex(16)}"


def _boot_mark() -> str:
    return f"{FORMAT} {_boot_id() or THIS_PROCESS}"


class LmdbStore(Store):
    """A store in a folder. One process opens it to write; others read it with `is_reader=True`.

    LMDB forbids to open one folder twice in a process: the writer's own readers use its `snapshot`.
    """

    _file: int | None = None  # its data

    def __init__(
        self,
        path: str | Path,
        generation: str,
        *,
        is_reader: bool = False,
        map_bytes_max: int = MAP_BYTES_MAX,
    ) -> None:
        self.path = Path(path)
        self.generation = generation
        self._map_bytes_max = map_bytes_max
        with self._explained(lmdb.Error, OSError):
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
        # Whether what happens to each key is kept from now on (see `key_events`): set by the writer.
        self.tells_events = False
        self.events_portion_bytes = PORTION_BYTES
        self.events_bytes_max = KEPT_BYTES_MAX
        self._pages = pages_of(self._env, self._file)
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
        """Have the file's pages mapped, in a thread, as far as they fit into half of the memory that is left."""
        if self._pages is not None:
            with suppress(RuntimeError):  # the interpreter ends
                start_new_thread(self._pages.populate, (available_bytes() // 2,))

    def _open_to_write(self) -> lmdb.Environment:
        """Open the folder; one from before the last boot is made anew. StoreDamagedError for one that is damaged."""
        boot = self.path / "boot"
        is_kept = boot.is_file() and boot.read_text() == _boot_mark()
        if is_kept:
            self._allocate_lock_file()
            return self._open(readonly=False)
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        self._allocate_lock_file()
        env = self._open(readonly=False)
        boot.write_text(_boot_mark())
        return env

    def _allocate_lock_file(self) -> None:
        """Take the lock file's room on the disk at once: LMDB maps it, and a page without room is a signal (SIGBUS)."""
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
    def _explained(self, *kinds: type[Exception]) -> Iterator[None]:
        try:
            yield
        except kinds as error:
            if (damage := of_damage(error)) is not None:
                raise damage from error
            if isinstance(error, (lmdb.MapFullError, lmdb.DiskError)) or any(text in str(error) for text in NO_ROOM):
                raise StoreFullError(
                    f"no room in the store {self.path}: {error}; make room on the disk, or raise its limit"
                ) from error
            raise StoreError(f"the store {self.path} cannot be used: {error}") from error

    def begin(self) -> lmdb.Transaction[bytes]:
        """Open a read transaction on `keys`; pages it sees are kept until it ends."""
        try:
            return self._begin()
        except lmdb.Error as error:
            raise of_damage(error) or StoreError(f"the store {self.path} cannot be read: {error}") from error

    @contextmanager
    def _writing(self) -> Iterator[lmdb.Transaction[bytes]]:
        """A write transaction; it commits if the block ends without an error, and then its errors are ours."""
        with self._explained(lmdb.Error), self._env.begin(write=True, buffers=False) as txn:
            yield txn
        with self._explained(OSError):
            self._fill()

    def _fill(self) -> None:
        """Make the file as long as its pages say: LMDB leaves out the last ones if a transaction freed them again."""
        needed = (self._env.info()["last_pgno"] + 1) * self._page_bytes
        if os.stat(self.path / DATA).st_size < needed:
            os.truncate(self.path / DATA, needed)

    def _meta(self, txn: lmdb.Transaction[bytes]) -> Meta:
        return read_meta(txn, self.tables, self.generation)

    @property
    def applied(self) -> Applied:
        with self.begin() as txn:
            return self._meta(txn).applied

    @property
    def lineage(self) -> str:
        return self.path.name  # a store that is built anew has a folder of its own

    @property
    def slot_ownership(self) -> SlotOwnership:
        """Which slots are owned, loaded and given up."""
        with self.begin() as txn:
            return self._meta(txn).slot_ownership or SlotOwnership()

    def _work(
        self, txn: lmdb.Transaction[bytes], meta: Meta, now_ms: int, slots: KeyGroups | None = None
    ) -> ExpiryTransaction:
        """Begin changes; in a store of some slots, of those given, or of the owned ones."""
        if meta.slot_ownership is None:
            return ExpiryTransaction(txn, self.tables, meta, now_ms)
        return SlotsTransaction(txn, self.tables, meta, now_ms, meta.slot_ownership.owned if slots is None else slots)

    def apply(self, epoch: EpochChanges, states: Sequence[StateDescriptor]) -> int:
        with self._writing() as txn:
            work = self._work(txn, self._meta(txn), epoch.clock_ms)
            if self.tells_events:
                work.record_events(epoch.epoch, epoch.term, self.events_portion_bytes, self.events_bytes_max)
            self._change(txn, work, epoch, states)
            work.store_changed_keys(epoch.epoch)
            work.meta.applied = replace(work.meta.applied, epoch=epoch.epoch, term=epoch.term, clock_ms=epoch.clock_ms)
            work.finish()
            return work.changed

    def _change(
        self,
        txn: lmdb.Transaction[bytes],
        work: LmdbTransaction,
        epoch: EpochChanges,
        states: Sequence[StateDescriptor],
    ) -> None:
        work.declare(states, epoch.replaces)
        work.apply_all(epoch.runs, self._pages if self._pages is not None and self._pages.learn(txn) else None)
        work.delete_untouched()

    def expire(self, now_ms: int, most: int) -> int:
        with self._env.begin() as txn:
            meta = self._meta(txn)
            clock_ms = removed_to_ms = meta.applied.clock_ms
            if meta.slot_ownership is not None and meta.slot_ownership.loading is not None:
                # What is loaded is in the past, and what expired since may still be changed there before it does.
                removed_to_ms = min(clock_ms, meta.slot_ownership.loading.clock_ms)
            announced_to_ms = max(now_ms, clock_ms)
            if not has_expired(txn, self.tables, meta.announced, announced_to_ms, removed_to_ms):
                return 0
        with self._writing() as txn:
            work = self._work(txn, meta, removed_to_ms, ALL)
            if self.tells_events:
                applied = meta.applied
                work.record_events(applied.epoch, applied.term, self.events_portion_bytes, self.events_bytes_max)
            done = work.announce_expired(announced_to_ms, most)
            work.store_expired_keys()
            done += work.remove_expired(most - done)
            work.finish()
            return done

    def forget_events(self, portions_max: int) -> bool:
        """Remove what is kept of events, about so many portions; True if nothing of them is left."""
        with self._env.begin() as txn:
            if txn.get(EVENTS, db=self.tables.meta) is None:
                return True
        with self._writing() as txn:
            return forget(txn, self.tables.meta, portions_max)

    def hold(self, wanted: KeyGroups) -> SlotOwnership:
        """Own no slot but those wanted from now on, and begin to load some that are missing; return what is held.

        A store without an epoch owns them at once. The first time that a store of all slots gives some up its keys are
        counted, about a microsecond for each.
        """
        if self._toward(self.applied, self.slot_ownership, wanted) == self.slot_ownership:
            return self.slot_ownership
        with self._writing() as txn:
            meta = self._meta(txn)
            is_counted = meta.slot_ownership is not None
            before = meta.slot_ownership = meta.slot_ownership or SlotOwnership()
            work = SlotsTransaction(txn, self.tables, meta, 0)
            if not is_counted:
                work.count_all()
            meta.slot_ownership = self._toward(meta.applied, before, wanted)
            work.finish()
            return meta.slot_ownership

    @staticmethod
    def _toward(applied: Applied, slot_ownership: SlotOwnership, wanted: KeyGroups) -> SlotOwnership:
        return SlotOwnership(wanted) if applied.epoch < 0 else slot_ownership.toward(wanted, applied.epoch)

    def load(self, portion: EpochChanges, states: Sequence[StateDescriptor], then: Loading) -> int:
        """Apply a part of a snapshot or of an epoch to the slots that are being loaded, and note how far they are then.

        portion: runs of these slots only; all of an epoch that replaces states. Slots that are at the epoch of the
        others are owned from then on. Returns about how many changes made a difference.
        """
        with self._writing() as txn:
            meta = self._meta(txn)
            ownership = meta.slot_ownership
            if ownership is None or ownership.loading is None or ownership.loading.slots != then.slots:
                raise StoreError(f"the store {self.path} does not load the slots {then.slots}")
            work = SlotsTransaction(txn, self.tables, meta, portion.clock_ms, then.slots)
            self._change(txn, work, portion, states)
            meta.slot_ownership = ownership.loaded(then, meta.applied)
            work.finish()
            return work.changed

    def load_anew(self) -> None:
        """Give up what was loaded so far of slots that are not owned yet; `hold` begins again once it is removed."""
        with self._writing() as txn:
            meta = self._meta(txn)
            if meta.slot_ownership is not None:
                meta.slot_ownership = meta.slot_ownership.anew()
                txn.put(b"applied", meta.to_bytes(), db=self.tables.meta)

    def remove_left(self, keys_max: int) -> bool:
        """Remove up to about `keys_max` keys of slots that were given up; False if there were none any more."""
        leaving = self.slot_ownership.leaving
        if not leaving:
            return False
        with self._writing() as txn:
            meta = self._meta(txn)
            assert meta.slot_ownership is not None
            work = SlotsTransaction(txn, self.tables, meta, 0, leaving)
            rest = work.remove_slots(keys_max)
            meta.slot_ownership = replace(meta.slot_ownership, leaving=rest)
            work.finish()
            return True

    def snapshot(self, now_ms: int) -> LmdbSnapshot:
        return LmdbSnapshot(self.begin, self.tables, self.generation, now_ms, self._env, self._file)

    def clear_stale_readers(self) -> int:
        """Free the reader slots of processes that died; their old pages would be kept for ever. Returns how many."""
        with self._explained(lmdb.Error):
            return int(self._env.reader_check())

    def verify(self) -> None:
        """Read everything; StoreDamagedError if something is not what was written. A second for a million rows."""
        self.check_length()
        with self._explained(lmdb.Error), self._env.begin() as txn:
            verify(txn, self.tables)

    def check_length(self) -> None:
        """Raise StoreDamagedError for a file that was cut short: to touch what it lacks would end this process."""
        check_length(self.path / DATA)

    def suspect(self) -> None:
        """Have the writer verify the store: a reader met something that is not what was written."""
        with suppress(OSError):
            (self.path / SUSPECT).touch()

    @property
    def is_suspect(self) -> bool:
        """Tell whether a reader met damage since the store was verified last."""
        return (self.path / SUSPECT).exists()

    def clear_suspicion(self) -> None:
        """Forget that a reader met damage."""
        (self.path / SUSPECT).unlink(missing_ok=True)

    def used_bytes(self) -> tuple[int, int]:
        """Return how much of the file is in use, and how much is free pages that wait to be used again."""
        with self._explained(lmdb.Error), self._env.begin() as txn:
            stats = [txn.stat(table) for table in self.tables]
            pages = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
            page_bytes = stats[0]["psize"]
            return pages * page_bytes, (self._env.info()["last_pgno"] + 1 - pages) * page_bytes

    def copy_to(self, path: Path) -> None:
        """Copy the store without its free pages. The folder appears as a whole; the call takes as long as the copy."""
        unfinished = path.with_name("copy")
        shutil.rmtree(unfinished, ignore_errors=True)
        with self._explained(lmdb.Error, OSError):
            try:
                unfinished.mkdir()
                self._env.copy(str(unfinished), compact=True)
                (unfinished / "boot").write_text(_boot_mark())
                unfinished.rename(path)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)

    def close(self) -> None:
        self._env.close()
        self._let_go_of_file()

    def __del__(self) -> None:
        if self._file is not None:  # nobody has a snapshot any more, as these hold the store
            self.close()

    def _let_go_of_file(self) -> None:
        """Close a reader's file for the last time, where nobody waits for that.

        One that was removed is given back to the disk then: 150 ms for each GB (measured), and LMDB's call does it with
        the interpreter's lock held.
        """
        file, self._file = self._file, None
        if file is None:
            return
        try:
            start_new_thread(os.close, (file,))  # a `Thread` waits until it runs, which it never does at the end
        except RuntimeError:  # the interpreter ends
            os.close(file)
