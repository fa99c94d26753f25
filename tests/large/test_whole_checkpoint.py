"""Ten million keys in a query's checkpoint: the whole state is in the log after reads in bounded memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import processes
from benchmarks.checkpoints import WrittenCheckpoint
from compat.waiting import eventually
from resp_server.net import children
from state_backend.log.change_log import ChangeLog

pytestmark = pytest.mark.large

KEYS, PARTITIONS = 10_000_000, 16
CHANGED = np.arange(0, KEYS, 50)
# All keys and values have 600 MB as rows of Spark, and more as change records.
MEMORY_BYTES_MAX = 450 << 20
READ_S_MAX = 600.0


def most_bytes_of(process: int) -> int:
    """Return the most memory that a process has taken."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def test_whole_state_of_ten_million_keys_is_read_in_bounded_memory(tmp_path: Path, report: Any) -> None:
    checkpoint = WrittenCheckpoint(tmp_path / "checkpoint", PARTITIONS)
    checkpoint.plan(0)
    checkpoint.write_snapshot(0, KEYS)
    checkpoint.commit(0)
    command = [sys.executable, "-m", "sparkis", "attach", "--job", "job", "--log", str(tmp_path / "log")]
    attached = subprocess.Popen([*command, "--checkpoint", str(checkpoint.folder)], env=children.environment())
    log = ChangeLog(tmp_path / "log").job("job")

    def rows_of(epoch: int) -> int | None:
        current = log.current()
        end = None if current is None else log.end(current)
        return None if end is None or end.epoch != epoch else end.rows

    try:
        with report.timed("in the log", KEYS):
            eventually(lambda: rows_of(0) == KEYS, awaited="the whole state", timeout_s=READ_S_MAX)
        checkpoint.plan(1)
        checkpoint.write_changes(1, CHANGED)
        checkpoint.commit(1)
        with report.timed("a batch after it", len(CHANGED)):
            eventually(lambda: rows_of(1) == len(CHANGED), awaited="the next batch", timeout_s=READ_S_MAX)
        most = [most_bytes_of(int(pid)) for pid in (attached.pid, *processes.below(attached.pid))]
        report("the most memory of each process", **{f"process_{n}": size for n, size in enumerate(most)})
        assert len(most) == 1 + min(os.cpu_count() or 1, PARTITIONS) or os.cpu_count() == 1
        assert max(most) < MEMORY_BYTES_MAX
    finally:
        attached.send_signal(signal.SIGTERM)
        assert attached.wait(timeout=READ_S_MAX) == 0
