"""Memory of each process of a small cluster: a registry, and two supervised state servers with one small job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from benchmarks import processes
from benchmarks.moves import TOKEN, command_of, online, program
from benchmarks.options import Options
from benchmarks.results import Row, single_row
from benchmarks.servers import BenchmarkError
from compat.waiting import eventually
from resp_server.net import children
from resp_server.net.children import TOKEN_VARIABLE
from resp_server.programs.executor_supervisor import start_of
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

KEYS = 1000
SERVERS = 2
SUPERVISOR = "-m resp_server.programs.executor_supervisor"
# Each kind of process: how its command goes on after Python, and how many there are.
KINDS = {
    "a registry": ("-m sparkis registry", 1),
    "a supervisor": (SUPERVISOR, SERVERS),
    "a state server": ("-m sparkis state-server", SERVERS),
    "an applier": ("-m state_backend.apply.applier", SERVERS),
}
TIMEOUT_S = 120.0


def rows(options: Options) -> Iterator[Row]:
    """Yield the memory of each kind of process; a shared page is divided among the processes that have it."""
    options.report("memory: starting a small cluster")
    with TemporaryDirectory(prefix="sparkis-bench-") as folder, ExitStack() as stack:
        log = Path(folder, "log")
        with LogWriter(log, "job", [StateDescriptor("s", key="k", value="v")]) as writer:
            writer.publish([Change("s", Op.PUT, b"job:s:%d" % i, None, b"v") for i in range(KEYS)])
        stack.enter_context(program("registry", log, "--port", "0"))
        for number in range(SERVERS):
            stack.enter_context(_supervised(log, Path(folder, f"{number}")))
        eventually(lambda: online(log) == SERVERS, awaited="the servers", timeout_s=TIMEOUT_S, error=BenchmarkError)
        for name, (word, count) in KINDS.items():
            pids = list(_processes_of(folder, word))
            if len(pids) != count:
                raise BenchmarkError(f"{len(pids)} processes are {name}, and not {count}")
            mib = fmean(processes.memory(pid).proportional_bytes for pid in pids) / (1 << 20)
            note = f"one job of {KEYS:,} keys on {SERVERS} state servers; shared pages are divided"
            yield single_row(f"{name} of a small cluster", "memory", [mib], unit="MiB", note=note)


def _processes_of(folder: str, command: str = "") -> Iterator[int]:
    """Iterate over the processes whose command names a folder, and goes on like this after Python."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            _, _, words = processes.command_of(int(entry.name)).partition(" ")
            if folder in words and words.startswith(command):
                yield int(entry.name)


@contextmanager
def _supervised(log: Path, folder: Path) -> Iterator[None]:
    """Run a state server as beside an executor, for which this process stands. The supervisor leaves its parent."""
    folder.mkdir()
    lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
    watched = f"{os.getpid()}:{start_of(os.getpid())}"
    command = [sys.executable, "-m", "resp_server.programs.executor_supervisor", "--lock", str(lock)]
    command += ["--watch", watched, "--folder", str(folder), "--"]
    command += command_of("state-server", log, "--port", "0", "--store", folder / "store")
    subprocess.run(command, pass_fds=[lock], env=children.environment() | {TOKEN_VARIABLE: TOKEN}, check=True)
    os.close(lock)
    try:
        yield
    finally:
        for pid in _processes_of(str(folder), SUPERVISOR):
            os.kill(pid, signal.SIGTERM)
        eventually(lambda: not list(_processes_of(str(folder))), awaited="the server's end", error=BenchmarkError)
