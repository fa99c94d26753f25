"""`make soak`: an hour of random epochs beside a crowd of clients; readers compare replies and are killed.

A server with two workers applies a log that this process writes: puts, deletes, fields, lists, expiries, replaced
states. Readers compare all replies with a model; epochs must not go backwards for them. Other readers pin old epochs
and are killed with SIGKILL. Beside them is a crowd (`soak_crowd`): thousands of clients, slow readers, floods, garbage,
somebody who looks at the page, a scraper of the metrics. The sizes of the store, the log and the heaps must be flat
after a warm-up, LMDB's reader table must not keep slots of dead processes, and the server counts no errors but those
that the crowd provokes. The first error ends the run with exit code 1 and its text.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from statistics import median

import lmdb
import redis

from benchmarks import processes
from benchmarks.servers import TOKEN, BenchmarkError, start_sparkis, supports_workers, temporary_folder
from benchmarks.soak_model import JOB, LISTS, MAPS, MARKER, STATES, Model, Plan
from benchmarks.soak_readers import newest_store
from compat.conformance.servers import free_port
from compat.processes import end_in_order
from compat.waiting import eventually
from resp_server.net import children
from resp_server.net.client import Client
from resp_server.net.listeners import raise_file_limit
from state_backend.apply.store_copies import COMPACT_ABOVE_BYTES, COMPACT_PAUSE_S
from state_backend.lmdb.record_format import TABLES
from state_backend.log.log_writer import LogWriter
from state_backend.model.clock import now_ms
from state_backend.model.errors import SparkisError

WORKERS = 2
CLIENTS = 2
# Clients of each role of the crowd, but the calm ones (`--clients`).
CROWD = {"slow": 20, "flood": 2, "garbage": 4}
# What the crowd provokes: garbage that is no request, or no known one, and requests before the server has loaded.
PROVOKED_ERRORS = {"ERR", "LOADING", "WRONGTYPE"}
VICTIMS = 3
KILLED_EVERY_S = 3.0
SAMPLED_EVERY_S = 1.0
RETENTION_MINUTES = 0.5
# The applier removes dead readers from LMDB's reader table at every step, and at least once a second.
STALE_READERS_S_MAX = 15.0
# A reader that sees no newer epoch for this long hangs or gets stale replies, as there are many epochs a second.
STILL_S_MAX = 60.0
MIB = 1 << 20
# The last third of a run may exceed the middle third by the larger of these, and still counts as flat.
GROWTH_SHARE_MAX = 0.15
# Between two copies without its free pages, a store's file grows. So a shorter run tells nothing of growth.
FLAT_AFTER_S = 3 * COMPACT_PAUSE_S
GROWTH_BYTES_MAX = {"store": 16 * MIB, "log": 16 * MIB, "heap": 8 * MIB}
START_S_MAX = 120.0
# Room for all who are not calm.
CLIENTS_BESIDE = 1_000
FINISH_S_MAX = 120.0


class SoakError(Exception):
    """A failed check; the message says which one."""


@dataclass
class Reader:
    """A reader's process, and its output."""

    role: str
    process: subprocess.Popen[str]
    compared: int = 0
    skipped: int = 0
    epoch: int = -1
    wrong: str = ""
    moved_s: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, role: str, *given: str, module: str = "benchmarks.soak_readers") -> Reader:
        """Start a reader."""
        command = [sys.executable, "-m", module, role, *given]
        environment = children.environment()
        pipe = subprocess.PIPE
        reader = cls(role, subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment))
        threading.Thread(target=reader._listen, daemon=True).start()
        return reader

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            report = json.loads(text)
            self.wrong = report.get("wrong", self.wrong)
            if report.get("epoch", self.epoch) != self.epoch:
                self.epoch, self.moved_s = report["epoch"], time.monotonic()
            self.compared += report.get("compared", 0)
            self.skipped += report.get("skipped", 0)

    def check(self, *, is_writing: bool) -> None:
        """Raise SoakError if the reader found a mismatch, ended, or sees no new epochs although there are some."""
        if self.wrong:
            raise SoakError(f"a {self.role} reader: {self.wrong}")
        if self.process.poll() is not None:
            time.sleep(0.5)  # its last output may be on its way
            raise SoakError(
                f"a {self.role} reader ended with {self.process.returncode}: {self.wrong or 'without a message'}"
            )
        still_s = time.monotonic() - self.moved_s
        if is_writing and self.role in ("client", "store") and still_s > STILL_S_MAX:
            raise SoakError(f"a {self.role} reader has seen nothing newer than epoch {self.epoch} for {still_s:.0f} s")

    def end(self) -> None:
        """Stop the reader; kill it if it does not stop."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True)
class Sample:
    """The sizes at one moment, in bytes. heaps: anonymous memory by process."""

    at_s: float
    epoch: int
    store: int
    live: int
    log: int
    heaps: dict[str, int]
    resident: dict[str, int]


class Soak:
    """One run."""

    def __init__(self, folder: Path, minutes: float, seed: int, period_ms: int, clients: int) -> None:
        self._log, self._folder = folder / "log", folder / "store" / JOB
        self._seconds = minutes * 60
        self._random = Random(seed)
        self._plan = Plan(seed, now_ms(), period_ms)
        self._writer = LogWriter(self._log, JOB, STATES)
        self._epoch = -1
        self._rows = 0
        self._kills = 0
        self._dead: dict[int, float] = {}
        self._samples: list[Sample] = []
        self._stores: set[Path] = set()
        self._snapshots: set[str] = set()
        self._failure = ""
        self._ends = threading.Event()
        self._publish()
        self._clients, self._metrics = clients, f"127.0.0.1:{free_port()}"
        options = ["--compact", "--retention", str(RETENTION_MINUTES), "--metrics", self._metrics]
        options += ["--maxclients", str(clients + CLIENTS_BESIDE)]
        workers = WORKERS if supports_workers() else 1
        self._process, self._port, control_port = start_sparkis(
            self._log, folder / "store", workers=workers, options=options
        )
        self._control = Client("127.0.0.1", control_port, password=TOKEN, timeout_s=30)
        self._readers: list[Reader] = []
        self._victims: list[Reader] = []
        self._crowd: list[Reader] = []
        self._page: subprocess.Popen[str] | None = None

    def _start_readers(self) -> None:
        eventually(
            lambda: self._read_marker() is not None,
            awaited="reading the first epoch",
            timeout_s=START_S_MAX,
            error=BenchmarkError,
        )
        plan = json.dumps(asdict(self._plan))
        self._readers = [Reader.start("client", str(self._port), plan) for _ in range(CLIENTS)]
        self._readers += [Reader.start("store", str(self._folder), plan)]
        self._victims = [self._new_victim() for _ in range(VICTIMS)]
        command = [sys.executable, "-m", "sparkis", "ui", "--url", f"redis://127.0.0.1:{self._port}", "--port", "0"]
        pipe = subprocess.PIPE
        self._page = subprocess.Popen([*command, "--child"], stdin=pipe, stdout=pipe, text=True)
        assert self._page.stdout is not None
        address = self._page.stdout.readline().partition(" ")[0]
        roles = {"calm": self._clients, **CROWD}
        given = [(role, str(self._port), str(count)) for role, count in roles.items()]
        given.append(("look", address, f"http://{self._metrics}/metrics"))
        self._crowd = [Reader.start(*each, module="benchmarks.soak_crowd") for each in given]

    def _read_marker(self) -> int | None:
        """Return the epoch that a client sees; None while the server is loading."""
        try:
            with redis.Redis(port=self._port) as client:
                found = client.get(MARKER)
        except redis.ResponseError:
            return None
        assert found is None or isinstance(found, bytes)
        return None if found is None else int(found)

    def _new_victim(self) -> Reader:
        return Reader.start("victim", str(self._port), str(self._folder))

    def run(self, report: Callable[[str], None]) -> None:
        """Write, sample and kill until the time is over, then compare everything once more."""
        self._start_readers()
        started_s = time.monotonic()
        writing = threading.Thread(target=self._keep_writing, daemon=True)
        writing.start()
        next_kill_s = started_s + KILLED_EVERY_S
        while (passed_s := time.monotonic() - started_s) < self._seconds:
            self._inspect(passed_s)
            if time.monotonic() >= next_kill_s:
                next_kill_s += KILLED_EVERY_S
                self._kill()
            report(
                f"{passed_s:.0f} of {self._seconds:.0f} s, epoch {self._epoch}, {self._compared():,} replies compared"
            )
            time.sleep(SAMPLED_EVERY_S)
        self._ends.set()
        writing.join(FINISH_S_MAX)
        self._check()
        self._check_errors()
        self._compare_all()
        self._check_flat()

    def close(self) -> None:
        """Stop all processes."""
        self._ends.set()
        for reader in (*self._readers, *self._victims, *self._crowd):
            reader.end()
        if self._page is not None:
            self._page.communicate()
        self._control.close()
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def report(self) -> str:
        """Return a summary of a few lines."""
        if not self._samples:
            return "the run ended before the first sample"
        samples, last = self._samples, self._samples[-1]
        skipped = sum(each.skipped for each in self._readers)
        done = (
            f"{last.at_s:.0f} s; {self._epoch + 1:,} epochs with {self._rows:,} changes; {self._kills} readers killed"
        )
        read = f"{self._compared():,} replies compared; {skipped:,} not: an epoch or an expiry was in between"
        crowd = "replies to " + ", ".join(f"{each.role} clients {each.compared:,}" for each in self._crowd)
        made = f"{len(self._snapshots)} snapshots of the log, {len(self._stores)} successive files of the store"
        lines = [done, read, crowd, made, f"{'MiB':28}{'first':>8}{'highest':>10}{'last':>8}"]
        sizes = {
            "store file": [each.store for each in samples],
            "live pages": [each.live for each in samples],
            "change log": [each.log for each in samples],
            **{f"{name}, heap": [each.heaps.get(name, 0) for each in samples] for name in last.heaps},
            **{f"{name}, resident": [each.resident.get(name, 0) for each in samples] for name in last.resident},
        }
        for name, found in sizes.items():
            lines.append(f"{name:28}{found[0] / MIB:8.1f}{max(found) / MIB:10.1f}{found[-1] / MIB:8.1f}")
        return "\n".join(lines)

    # Writing

    def _keep_writing(self) -> None:
        try:
            while not self._ends.is_set():
                self._publish()
                self._control.call("NOTICE", JOB, str(self._epoch))
                due_ms = self._plan.clock_ms(self._epoch + 1) - now_ms()
                self._ends.wait(max(0, due_ms) / 1000)
        except (SparkisError, OSError) as error:
            self._failure = f"epoch {self._epoch + 1} could not be written: {error}"

    def _publish(self) -> None:
        epoch = self._plan.epoch(self._epoch + 1)
        clock_ms = self._plan.clock_ms(epoch.number)
        self._writer.publish(epoch.changes, epoch.number, replaces=epoch.replaces, clock_ms=clock_ms)
        self._rows += len(epoch.changes)
        self._epoch = epoch.number

    # Killing

    def _kill(self) -> None:
        index = self._random.randrange(VICTIMS)
        victim = self._victims[index]
        victim.check(is_writing=True)
        victim.process.send_signal(signal.SIGKILL)
        victim.process.wait()
        self._kills += 1
        self._victims[index] = self._new_victim()

    # Samples

    def _inspect(self, passed_s: float) -> None:
        self._check()
        path = newest_store(self._folder)
        if path is None:
            raise SoakError(f"there is no store in {self._folder}")
        self._stores.add(path)
        self._snapshots.update(each.parent.name for each in self._log.glob(f"{JOB}/*/snapshots/*/manifest.json"))
        found = self._read_store(path)
        if found is None:
            return  # the next sample has it
        live_bytes, dead = found
        now_s = time.monotonic()
        self._dead = {pid: self._dead.get(pid, now_s) for pid in dead}
        for pid, seen_s in self._dead.items():
            if now_s - seen_s > STALE_READERS_S_MAX:
                raise SoakError(f"LMDB's table of readers has had the dead process {pid} for {now_s - seen_s:.0f} s")
        self._samples.append(self._sample(passed_s, path, live_bytes))

    def _sample(self, passed_s: float, path: Path, live_bytes: int) -> Sample:
        heaps, resident = {}, {}
        for name, pid in self._watched().items():
            try:
                found = processes.memory(pid)
            except OSError:
                raise SoakError(f"the {name} (process {pid}) has ended") from None
            heaps[name], resident[name] = found.anonymous_bytes, found.resident_bytes
        return Sample(
            passed_s, self._epoch, _allocated(path), live_bytes, processes.disk_bytes(self._log), heaps, resident
        )

    def _watched(self) -> dict[str, int]:
        """Return the processes whose memory must stay flat; without the compactor, which runs only now and then."""
        found = {"server": self._process.pid}
        workers = 0
        for pid in sorted(processes.below(self._process.pid)):
            command = processes.command_of(pid)
            if "state_backend.apply.applier" in command:
                found["applier"] = pid
            elif "resp_server" in command:
                workers += 1
                found[f"worker {workers}"] = pid
        if self._page is not None:
            found["page"] = self._page.pid
        if "applier" not in found:
            raise SoakError("there is no applier")
        return found

    def _read_store(self, path: Path) -> tuple[int, list[int]] | None:
        """Return a store's used bytes, and the dead readers in its table; None if it was just removed or enlarged."""
        try:
            with lmdb.open(str(path), readonly=True, max_dbs=len(TABLES), create=False) as env:
                with env.begin() as txn:
                    stats = [txn.stat(env.open_db(name, txn=txn, create=False)) for name in TABLES]
                pages = sum(each["branch_pages"] + each["leaf_pages"] + each["overflow_pages"] for each in stats)
                pids = [int(line.split()[0]) for line in env.readers().splitlines() if line.split()[0].isdigit()]
        except lmdb.MapResizedError:
            return None  # the applier has enlarged the file after it was opened here
        except (lmdb.Error, OSError):
            if path.exists() and path == newest_store(self._folder):
                raise
            return None
        return pages * stats[0]["psize"], [pid for pid in pids if not Path(f"/proc/{pid}").exists()]

    def _check(self) -> None:
        if self._failure:
            raise SoakError(self._failure)
        if self._process.poll() is not None:
            raise SoakError(f"the server ended with {self._process.returncode}")
        for reader in (*self._readers, *self._victims, *self._crowd):
            reader.check(is_writing=not self._ends.is_set())

    def _compared(self) -> int:
        return sum(each.compared for each in self._readers)

    # At the end

    def _check_errors(self) -> None:
        """Look at the errors that the server has counted."""
        with redis.Redis(port=self._port) as client:
            counted = {name.removeprefix("errorstat_") for name in client.info("errorstats")}
        if counted - PROVOKED_ERRORS:
            raise SoakError(
                f"the server has replied with errors that nobody provoked: {sorted(counted - PROVOKED_ERRORS)}"
            )

    def _compare_all(self) -> None:
        """Read every key at the last epoch, and keys that must be missing."""
        model = Model(self._plan)
        model.advance(self._epoch)
        with redis.Redis(port=self._port) as client:
            eventually(
                lambda: self._read_marker() == self._epoch,
                awaited="reading the last epoch",
                timeout_s=FINISH_S_MAX,
                error=BenchmarkError,
            )
            keys = set(client.scan_iter(count=1000))
            unknown = keys - model.values.keys()
            if unknown:
                raise SoakError(f"{len(unknown)} keys should not exist, {min(unknown)!r} among them")
            for name, stored in model.values.items():
                from_ms = now_ms()
                found = _read(client, name) or None
                if stored.is_certain(from_ms - 100, now_ms() + 100) and found != (stored.expected(from_ms) or None):
                    raise SoakError(f"{name!r} has a wrong value at the last epoch: {str(found)[:300]}")

    def _check_flat(self) -> None:
        """Compare the last third of the run with the one before, and the store's file size with its live data."""
        _check_sizes(self._samples, self._seconds)
        eventually(
            self._has_few_free_pages,
            awaited=f"the store's file has at most twice its live pages and {COMPACT_ABOVE_BYTES / MIB:.0f} MiB",
            timeout_s=FINISH_S_MAX,
            interval_s=SAMPLED_EVERY_S,
            error=SoakError,
        )

    def _has_few_free_pages(self) -> bool:
        """Return whether the store's file is as small as its rules allow. The applier may have ended: nobody writes."""
        path = newest_store(self._folder)
        found = None if path is None else self._read_store(path)
        return path is not None and found is not None and _allocated(path) <= 2 * found[0] + COMPACT_ABOVE_BYTES


def _check_sizes(samples: Sequence[Sample], seconds: float) -> None:
    """Raise SoakError if a size grows, in a run that was long enough to tell."""
    if seconds < FLAT_AFTER_S:
        return
    _check_growth("store", "store's file", [each.store for each in samples])
    _check_growth("log", "change log", [each.log for each in samples])
    for name in samples[-1].heaps:
        _check_growth("heap", f"{name}'s heap", [each.heaps.get(name, 0) for each in samples])


def _check_growth(kind: str, name: str, sizes: Sequence[int]) -> None:
    """Raise SoakError if the last third of a run was larger than the third before it; the first is warm-up.

    Files grow and shrink all the time, so the medians are compared: a leak moves them.
    """
    third = len(sizes) // 3
    if not third:
        return
    was, now = median(sizes[third : 2 * third]), median(sizes[2 * third :])
    if now > was + max(GROWTH_BYTES_MAX[kind], was * GROWTH_SHARE_MAX):
        raise SoakError(
            f"the {name} grows: {was / MIB:.1f} MiB in the middle third of the run, {now / MIB:.1f} MiB in the last "
            f"(medians)"
        )


def _allocated(path: Path) -> int:
    try:
        return (path / "data.mdb").stat().st_size
    except FileNotFoundError:  # another store has just taken its place
        return 0


def _read(client: redis.Redis, name: bytes) -> object:
    state = name.split(b":")[1].decode()
    if state in MAPS:
        return client.hgetall(name)
    return client.lrange(name, 0, -1) if state in LISTS else client.get(name)


def main() -> int:
    """Run the soak test; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--minutes", type=float, default=60.0, help="duration in minutes (default %(default)g)")
    parser.add_argument("--seed", type=int, default=1, help="the seed of the random epochs (default %(default)s)")
    parser.add_argument(
        "--period-ms", type=int, default=100, help="milliseconds between two epochs (default %(default)s)"
    )
    parser.add_argument(
        "--clients", type=int, default=10_000, help="calm clients beside the others (default %(default)s)"
    )
    given = parser.parse_args()
    raise_file_limit(given.clients)
    end_in_order()

    def report(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    title = (
        f"soak: {given.minutes:g} minutes, an epoch every {given.period_ms} ms, {given.clients:,} clients, "
        f"seed {given.seed}"
    )
    print(title, flush=True)
    failure = ""
    with temporary_folder() as folder:
        soak = Soak(folder, given.minutes, given.seed, given.period_ms, given.clients)
        try:
            soak.run(report)
        except (SoakError, BenchmarkError, SparkisError, redis.RedisError, lmdb.Error, OSError) as error:
            failure = str(error) if isinstance(error, SoakError) else f"{type(error).__name__}: {error}"
        finally:
            report("")
            soak.close()
        print(soak.report(), flush=True)
    if failure:
        print(f"soak: FAILED: {failure}", file=sys.stderr)
        return 1
    is_short = given.minutes * 60 < FLAT_AFTER_S
    print(f"soak: passed{f'; less than {FLAT_AFTER_S / 60:.0f} minutes tell nothing of growth' if is_short else ''}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("soak: interrupted")
