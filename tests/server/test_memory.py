"""What a server that only reads stores has in its memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from resp_server import children
from resp_server.client import Client
from state_backend.descriptor import StateDescriptor
from state_backend.log_writer import LogWriter
from state_backend.records import Change, Op, runs_of


def test_a_server_that_reads_stores_loads_neither_arrow_nor_numpy(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "log", "job", [StateDescriptor("s", key="key", value="value")])
    file, inline = writer.change_files(0).write(runs_of([Change("s", Op.PUT, b"job:s:1", None, b"1")], ["s"]))
    writer.commit(0, clock_ms=1, files=[file] if file else [], inline=[inline] if inline else [], rows=1, digest=0)
    command = [sys.executable, "-m", "resp_server.process", "--child", "--port", "0", "--log", str(tmp_path / "log")]
    command += ["--store", str(tmp_path / "store")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=children.environment())
    try:
        assert process.stdout is not None
        with Client("127.0.0.1", json.loads(process.stdout.readline())["port"], timeout_s=30) as client:
            assert client.call("GET", "job:s:1") == "1"
            assert client.call("SCAN", "0") == ["0", ["job:s:1"]]
            assert "job_job:" in client.call("INFO")
        mapped = Path(f"/proc/{process.pid}/maps").read_text()
        assert "lmdb" in mapped
        assert "libarrow" not in mapped
        assert "numpy" not in mapped
    finally:
        process.terminate()
        process.communicate(timeout=30)
