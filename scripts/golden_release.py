"""Make the golden folder of a release: `python scripts/golden_release.py`, as tests/golden/sparkis-<version>.tar.xz.

    log/            a job for each format of epochs, by its name, `format1` to `format4`, with a snapshot as of the
                    second of three epochs; the job `large`; the job `renamed`, by `sparkis rename`; the job `held`,
                    whose second generation is held back; the job `parts`, with half of a snapshot; registry.json
    store/          the store of a server of this log
    member/         the folder of a state server of this log
    owners.json     the owners of keys of a proxy with an upstream
    expected.json   the replies to reads of all keys (see `replies`)

Later versions must read these files as they are (tests/server/test_golden_releases.py): each release adds an archive,
and none is changed.
"""

from __future__ import annotations

import json
import lzma
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from redis import Redis

from resp_server.backends.routing.ownership import Ownership
from state_backend import VERSION
from state_backend.apply import snapshots
from state_backend.apply.applier import Applier
from state_backend.apply.compact import compact_log
from state_backend.apply.rename import rename
from state_backend.codec import keep_by_order
from state_backend.log.change_log import ChangeLog
from state_backend.log.epochs import Epoch
from state_backend.log.log_writer import LogWriter
from state_backend.model.clock import now_ms
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from state_backend.model.slot_set import SlotSet

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"

FOREVER_MS = 1 << 42
# More than an epoch's file takes itself.
MANY = 300
# More than a packed map, list or set has; the value is longer than a piece (see `lmdb.record_format`).
LARGE = 3000

STATES = {
    "format1": [
        StateDescriptor("value", key="k", value="v"),
        StateDescriptor("fields", key="k", field="f", value="v"),
        StateDescriptor("list", key="k", value="v", kind="list", length_max=3, duplicates="any"),
    ],
    "format2": [StateDescriptor("sum", key="k", value="v", reduce="sum", columns={"v": "bigint"})],
    "format3": [StateDescriptor("set", key="k", member="m"), StateDescriptor("sorted", key="k", member="m", score="s")],
    "format4": [StateDescriptor("last", key="k", value="v", last_by="t")],
    "large": [
        StateDescriptor("value", key="k", value="v"),
        StateDescriptor("fields", key="k", field="f", value="v"),
        StateDescriptor("list", key="k", value="v", kind="list", duplicates="any"),
        StateDescriptor("set", key="k", member="m"),
        StateDescriptor("sorted", key="k", member="m", score="s"),
    ],
}
# Of jobs that are more than their epochs (see `make_log`).
VALUE = StateDescriptor("value", key="k", value="v")
HALF = SlotSet.parse("0-8191")

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
        [Change("last", Op.FOLD, b"format4:last:a", value=keep_by_order.pack(order, value))]
        for order, value in ((b"\x80\x01", b"first"), (b"\x80\x03", b"last"), (b"\x80\x02", b"late"))
    ],
    "large": [
        [Change("fields", Op.PUT, b"large:fields:a", b"%d" % number, b"v") for number in range(LARGE)],
        [
            Change("value", Op.PUT, b"large:value:a", value=b"x" * (LARGE * 100)),
            *(Change("list", Op.APPEND, b"large:list:a", value=b"%d" % number) for number in range(LARGE)),
            *(Change("set", Op.PUT, b"large:set:a", b"%d" % number) for number in range(LARGE)),
        ],
        [Change("sorted", Op.PUT, b"large:sorted:a", b"%d" % number, b"%d" % -number) for number in range(LARGE)],
    ],
}


def make_log(root: Path) -> None:
    """Write the log."""
    for job, epochs in EPOCHS.items():
        states = [state.for_job(job) for state in STATES[job]]
        with LogWriter(root, job, states, f"query-{job}") as writer:
            for number, changes in enumerate(epochs):
                writer.publish(changes)
                if number == 1:
                    compact_log(str(root), job, retention_ms=3_600_000)
    write_values(root, "before")
    rename(root, "before", "renamed")
    write_values(root, "held")
    with LogWriter(root, "held", [VALUE.for_job("held")], "query-new", takeover=True, holds_back=True) as writer:
        writer.publish([Change("value", Op.PUT, b"held:value:new", value=b"new")])
    write_values(root, "parts")
    write_part(root, "parts", HALF)


def write_values(root: Path, job: str) -> None:
    """Write two epochs of a job with one state."""
    with LogWriter(root, job, [VALUE.for_job(job)], f"query-{job}") as writer:
        for epoch in range(2):
            keys = [f"{job}:value:{number}".encode() for number in range(MANY // 10)]
            writer.publish([Change("value", Op.PUT, key, value=b"%d" % epoch) for key in keys])


def write_part(root: Path, job: str, slots: SlotSet) -> Epoch | None:
    """Write a server's part of a snapshot; return the snapshot's epoch once it has all parts."""
    log = ChangeLog(root)
    with tempfile.TemporaryDirectory() as store:
        applier = Applier(log, job, store, lambda event: None, slots=slots)
        try:
            while applier.step():
                pass
            current = log.job(job).visible()
            assert applier.store is not None and current is not None
            with applier.store.snapshot(now_ms()) as snapshot:
                return snapshots.write(log.job(job), current, snapshot)
        finally:
            applier.close()


def make_owners(path: Path) -> None:
    """Write a file of owners: two jobs, of which one is released."""
    owners = Ownership(path, checks_new=True)
    owners.learn({"owned": {"s": "owned:s:<k>", "other": "other/<k>"}, "given-back": {"s": "back:<k>"}})
    owners.complete()
    owners.release("given-back")


@contextmanager
def running(*words: object, started: str = r"started @ \S+:(\d+)") -> Iterator[re.Match[str]]:
    """Run a program of sparkis until the end of the block; yield the match in the line that says that it runs."""
    environment = os.environ | {"SPARKIS_CONTROL_TOKEN": "golden"}
    command = [sys.executable, "-m", "sparkis", *map(str, words)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        try:
            logged = ""
            for line in process.stderr:
                logged += line
                if found := re.search(started, line):
                    yield found
                    break
            else:
                raise RuntimeError(f"{words[0]} has not started:\n{logged}")
        finally:
            process.terminate()
            process.stderr.read()


READS: dict[bytes, tuple[str, ...]] = {
    b"string": ("GET",),
    b"hash": ("HGETALL",),
    b"list": ("LRANGE", "0", "-1"),
    b"set": ("SMEMBERS",),
    b"zset": ("ZRANGE", "0", "-1", "WITHSCORES"),
}


def replies(port: int) -> dict[str, Any]:
    """Return all keys of a server: kind, time of expiry, and content."""
    with Redis(port=port, decode_responses=True) as client:
        found: dict[str, Any] = {}
        for key in sorted(client.scan_iter(count=1000)):
            kind = client.type(key)
            name, *arguments = READS[kind.encode()]
            content = client.execute_command(name, key, *arguments)
            if isinstance(content, set):
                content = sorted(content)
            found[key] = json.loads(json.dumps([kind, client.pexpiretime(key), content]))
        return found


def make(folder: Path) -> None:
    """Make the golden folder."""
    make_log(folder / "log")
    make_owners(folder / "owners.json")
    log = ("--log", folder / "log")
    with running("registry", *log, "--port", 0, started="started registry"):
        member = ("state-server", *log, "--store", folder / "member", "--port", 0)
        with running(*member, started="version 1 of the topology"):
            pass
    with running("serve", *log, "--store", folder / "store", "--port", 0, "--compact", "no") as found:
        (folder / "expected.json").write_text(json.dumps(replies(int(found[1])), indent=1))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        make(Path(temporary))
        archive = BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            tar.add(temporary, arcname=".")
    packed = lzma.compress(archive.getvalue(), preset=9 | lzma.PRESET_EXTREME)
    (GOLDEN / f"sparkis-{VERSION}.tar.xz").write_bytes(packed)
