"""A log that is copied while a job writes it, in the order that the page about backups says, can be read."""

from __future__ import annotations

import shutil
from pathlib import Path

from sparkis import Change, LogWriter, Op, StateDescriptor, read_snapshot

STATE = StateDescriptor("price", key="ticker", value="price")
KEY = b"market:price:ACME"
# Enough for a change file beside the epoch, which would otherwise contain its changes.
MANY = 5_000


def publish(writer: LogWriter, number: int) -> None:
    changes = [Change("price", Op.PUT, KEY, value=b"%d" % number)]
    changes += [Change("price", Op.PUT, b"market:price:%d" % each, value=b"%d" % number) for each in range(MANY)]
    writer.publish(changes)


def copy(log: Path, backup: Path, *, first: bool) -> None:
    """Copy the terms and epochs of all jobs, or all other files."""
    for path in log.rglob("*"):
        if path.is_file() and bool({"terms", "epochs"} & set(path.relative_to(log).parts)) is first:
            target = backup / path.relative_to(log)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)


def test_copy_ends_with_last_epoch_of_first_pass(tmp_path: Path) -> None:
    log, backup = tmp_path / "log", tmp_path / "backup"
    with LogWriter(str(log), "market", [STATE]) as writer:
        for number in range(3):
            publish(writer, number)
        copy(log, backup, first=True)
        publish(writer, 3)
        copy(log, backup, first=False)
        publish(writer, 4)
    assert list(backup.rglob("changes/*.arrow"))
    with read_snapshot(str(backup), "market") as snapshot:
        assert [snapshot.value(key) for key in (KEY, b"market:price:%d" % (MANY - 1))] == [b"2", b"2"]


def test_page_copies_in_this_order() -> None:
    page = (Path(__file__).parents[3] / "docs" / "backup.md").read_text()
    first, second = (line for line in page.splitlines() if line.startswith("$ rsync"))
    assert "--include '/*/terms/*' --include '/*/*/epochs/*' --exclude '*'" in first
    assert "--exclude '/*/terms/' --exclude '/*/*/epochs/'" in second
