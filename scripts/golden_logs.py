"""Make the golden log: `python scripts/golden_logs.py FILE`, as tests/golden/logs.tar.xz.

It has a job for each format of epochs, by its name: `format1` to `format4`. A job has three epochs, and a snapshot as
of the second. Later versions must read this log as it is: for a new format make another file, and keep this one.
"""

from __future__ import annotations

import io
import lzma
import sys
import tarfile
import tempfile
from pathlib import Path

from state_backend.apply.compact import compact_log
from state_backend.codec import selections
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

FOREVER_MS = 1 << 42
# More than an epoch's file takes itself.
MANY = 300

STATES = {
    "format1": [
        StateDescriptor("value", key="k", value="v"),
        StateDescriptor("fields", key="k", field="f", value="v"),
        StateDescriptor("list", key="k", value="v", kind="list", length_max=3, duplicates="any"),
    ],
    "format2": [StateDescriptor("sum", key="k", value="v", reduce="sum", columns={"v": "bigint"})],
    "format3": [StateDescriptor("set", key="k", member="m"), StateDescriptor("sorted", key="k", member="m", score="s")],
    "format4": [StateDescriptor("last", key="k", value="v", last_by="t")],
}
EPOCHS: dict[str, list[list[Change]]] = {
    "format1": [
        [Change("value", Op.PUT, b"format1:value:%d" % number, value=b"%d" % number) for number in range(MANY)],
        [
            Change("value", Op.DELETE, b"format1:value:1"),
            Change("fields", Op.PUT, b"format1:fields:a", b"x", b"1"),
            Change("fields", Op.PUT, b"format1:fields:a", b"y", b"2", FOREVER_MS),
        ],
        [Change("list", Op.APPEND, b"format1:list:a", value=value) for value in (b"1", b"2", b"3", b"4")],
    ],
    "format2": [[Change("sum", Op.FOLD, b"format2:sum:a", value=value)] for value in (b"5", b"7", b"-1")],
    "format3": [
        [Change("set", Op.PUT, b"format3:set:a", member) for member in (b"x", b"y")],
        [Change("sorted", Op.PUT, b"format3:sorted:a", b"x", b"1.5"), Change("set", Op.DELETE, b"format3:set:a", b"x")],
        [Change("sorted", Op.PUT, b"format3:sorted:a", b"y", b"-2")],
    ],
    "format4": [
        [Change("last", Op.FOLD, b"format4:last:a", value=selections.pack(order, value))]
        for order, value in ((b"\x80\x01", b"first"), (b"\x80\x03", b"last"), (b"\x80\x02", b"late"))
    ],
}


def make(root: Path) -> None:
    """Write the log."""
    for job, epochs in EPOCHS.items():
        states = [state.for_job(job) for state in STATES[job]]
        with LogWriter(root, job, states, f"query-{job}") as writer:
            for number, changes in enumerate(epochs):
                writer.publish(changes)
                if number == 1:
                    compact_log(str(root), job, retention_ms=3_600_000)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            tar.add(folder, arcname=".")
    Path(sys.argv[1]).write_bytes(lzma.compress(archive.getvalue(), preset=9 | lzma.PRESET_EXTREME))
