"""Memory of one server with twelve small jobs: while each has an applier, and when all of them rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import processes
from benchmarks.options import Options
from benchmarks.results import Row, single_row
from benchmarks.servers import BenchmarkError, ServerProcess, start_sparkis
from compat.waiting import eventually
from resp_server.net.client import Client, ClientError
from resp_server.serving.appliers import REST_AFTER_S
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

JOBS = 12
KEYS_OF_A_JOB = 1000
BUDGET_MIB = 95.4  # 100 MB
# After this time without an epoch an applier ends at its next look at the log.
REST_TIMEOUT_S = 3 * REST_AFTER_S


def rows(options: Options) -> Iterator[Row]:
    """Yield the memory of all processes, shared pages once, with and without appliers."""
    with TemporaryDirectory(prefix="sparkis-bench-") as folder:
        log = Path(folder, "log")
        for number in range(JOBS):
            _publish(log, f"job{number}")
        options.report(f"memory: waiting until {JOBS} jobs are at rest")
        server = start_sparkis(log, Path(folder, "store"))
        try:
            eventually(lambda: _are_loaded(server), awaited="all keys", timeout_s=REST_TIMEOUT_S, error=BenchmarkError)
            busy = _mib(server)
            eventually(
                lambda: not any(map(processes.is_applier, processes.below(server.process.pid))),
                awaited="the end of all appliers",
                timeout_s=REST_TIMEOUT_S,
                interval_s=1.0,
                error=BenchmarkError,
            )
            resting = _mib(server)
        finally:
            server.process.terminate()
            server.process.wait()
    note = f"{JOBS} jobs of {KEYS_OF_A_JOB:,} keys; all processes, shared pages once"
    yield single_row(f"{JOBS} jobs with their appliers", "memory", [busy], unit="MiB", note=note)
    yield single_row(f"{JOBS} jobs at rest", "memory", [resting], unit="MiB", budget=BUDGET_MIB, note=note)


def _publish(log: Path, job: str) -> None:
    with LogWriter(log, job, [StateDescriptor("s", key="k", value="v")]) as writer:
        writer.publish([Change("s", Op.PUT, b"%s:s:%d" % (job.encode(), i), None, b"v") for i in range(KEYS_OF_A_JOB)])


def _are_loaded(server: ServerProcess) -> bool:
    with Client("127.0.0.1", server.port) as client:
        try:
            return bool(client.call("DBSIZE") == JOBS * KEYS_OF_A_JOB)
        except ClientError:  # LOADING
            return False


def _mib(server: ServerProcess) -> float:
    """Return the memory of a server and all processes below it; a shared page is divided among those that have it."""
    pids = [server.process.pid, *processes.below(server.process.pid)]
    return sum(processes.memory(pid).proportional_bytes for pid in pids) / (1 << 20)
