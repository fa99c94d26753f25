"""A script that a failed query ends prints the one line about the failure last."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import threading
from types import SimpleNamespace

from spark_hooks.publish.failures import Failure
from state_backend.model.errors import SparkisError


def write():
    try:
        with Failure(lambda: SimpleNamespace(isActive=False)).reported():
            raise SparkisError("job 'sensors': a null key")
    except SparkisError:
        pass


# Spark calls a foreachBatch function in a thread of py4j, which is a daemon.
thread = threading.Thread(target=write, daemon=True)
thread.start()
thread.join()
raise SystemExit("Spark's stack traces")
"""


def test_script_that_failure_ends_waits_for_line() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[4])}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=False)
    assert done.stderr.splitlines() == ["Spark's stack traces", "job 'sensors': a null key"]
