"""The attachments to all queries below a folder: those that come, are refreshed, are broken, end, and go."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from compat.waiting import eventually
from spark_hooks.attach import followed_queries
from spark_hooks.attach.followed_queries import FollowedQueries
from spark_hooks.attach.queries import Source
from state_backend.apply.replay import read_snapshot
from state_backend.attach.attachment import Attachment
from state_backend.attach.start import attach_files
from state_backend.checkpoint.files import CheckpointFiles
from state_backend.log.change_log import ChangeLog
from state_backend.model.errors import DescriptorError, SparkisError
from tests.golden_checkpoints import NEWEST, unpack

JOB = "hdfs-whole-stream"
KEY = "{}:aggregation:all"


class Storage:
    """A pipeline's storage whose flows are copies of a golden checkpoint, and the log of their attachments."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder / "storage", folder / "log"

    def flow(self, name: str, number: int = 0, batch: int = 4) -> Path:
        """Make a flow's checkpoint, whose last batch is this one; -1: it has no commit."""
        target = "cat/db" if "/" in name else "cat/db/" + name
        path = unpack(NEWEST, JOB, self.folder / "_checkpoints" / target / name / str(number))
        (path / "metadata").write_text(json.dumps({"id": f"{name.replace('/', '-')}-{number}"}))
        for each in range(batch + 1, 5):
            (path / f"commits/{each}").rename(path / f"later-{each}")
        return path

    def count(self, job: str) -> str:
        """Return the count that readers of the log see."""
        with read_snapshot(str(self.log), job) as snapshot:
            found = snapshot.fields(KEY.format(job).encode(), [b"count"])
        return bytes(found[0]).decode()

    def generations(self, job: str) -> int:
        terms = ChangeLog(str(self.log)).job(job).terms
        last = terms.newest()
        assert last is not None
        return len({term.generation for term in terms.down_from(last.term) if not term.is_void})


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path)


Follow = Callable[[], FollowedQueries]


@pytest.fixture
def follow(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Follow]:
    """Follow the storage, without pauses, to the end of the test."""
    for name in ("LOOK_INTERVAL_LOCAL_S", "RETRY_INTERVAL_S"):
        monkeypatch.setattr(followed_queries, name, 0.0)
    made: list[FollowedQueries] = []

    def attach(location: str, job: str) -> Attachment:
        return attach_files(location, job=job, log=str(storage.log), catch_up_timeout_s=0)

    def start() -> FollowedQueries:
        folder = CheckpointFiles.at(str(storage.folder))
        made.append(FollowedQueries([Source(0, folder.location, None, folder, is_single=False)], attach))
        return made[-1]

    yield start
    for each in made:
        each.__exit__(None, None, None)


def commit(checkpoint: Path, batch: int) -> None:
    (checkpoint / f"later-{batch}").rename(checkpoint / f"commits/{batch}")


def jobs(attachments: list[Attachment]) -> list[str]:
    return [attachment.job for attachment in attachments]


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "sparkis.attach"]


def is_readable(attachments: list[Attachment]) -> None:
    for attachment in attachments:
        assert attachment.wait()


def test_flow_that_appears_is_followed_from_its_first_commit(storage: Storage, follow: Follow) -> None:
    storage.flow("a", batch=1)
    second = storage.flow("b", batch=-1)
    queries = follow()
    first = queries.start()
    assert jobs(first) == ["a"]
    is_readable(first)
    assert storage.count("a") == "24"
    assert list(queries.look()) == []
    commit(second, 0)
    storage.flow("c")
    new = list(queries.look())
    assert jobs(new) == ["b", "c"]
    is_readable(new)
    assert (storage.count("b"), storage.count("c")) == ("12", "60")
    assert list(queries.look()) == []


def test_full_refresh_is_new_generation_of_same_job(storage: Storage, follow: Follow) -> None:
    storage.flow("a")
    queries = follow()
    (old,) = queries.start()
    is_readable([old])
    refreshed = storage.flow("a", 1, batch=-1)
    assert list(queries.look()) == []  # readers keep the old state until there is a new one
    assert storage.count("a") == "60"
    commit(refreshed, 0)
    (new,) = queries.look()
    is_readable([new])
    assert (new.job, storage.count("a"), storage.generations("a")) == ("a", "12", 2)
    commit(refreshed, 1)
    eventually(lambda: storage.count("a"), lambda count: count == "24")
    assert old.batch == 4


def test_restart_resumes_every_job_also_after_full_refresh(storage: Storage, follow: Follow) -> None:
    storage.flow("a", batch=0)
    storage.flow("b")
    with follow() as queries:
        is_readable(queries.start())
    storage.flow("a", 1, batch=1)
    with follow() as queries:
        attachments = queries.start()
        assert jobs(attachments) == ["a", "b"]
        is_readable(attachments)
    assert (storage.generations("a"), storage.generations("b")) == (2, 1)
    assert (storage.count("a"), storage.count("b")) == ("24", "60")


BROKEN = {
    "metadata": "is not what Spark wrote|metadata",
    "offsets/4": "offsets/4",
    "state/0/_metadata/metadata": "state/0/_metadata/metadata",
    "state/0/0/_metadata/schema": "state/0/0/_metadata/schema",
}


@pytest.mark.parametrize("file", BROKEN)
def test_broken_checkpoint_is_left_out_until_it_is_mended(
    storage: Storage, follow: Follow, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken = storage.flow("a") / file
    storage.flow("b")
    whole = broken.read_bytes()
    broken.write_bytes(b"\xff{")
    queries = follow()
    assert jobs(queries.start()) == ["b"]
    assert list(queries.look()) == []
    (line,) = messages(caplog)
    assert "/db/a/a/0 is left out: " in line and file in line
    broken.write_bytes(whole)
    (mended,) = queries.look()
    is_readable([mended])
    assert storage.count("a") == "60"


def test_checkpoint_without_metadata_is_no_query(
    storage: Storage, follow: Follow, caplog: pytest.LogCaptureFixture
) -> None:
    (storage.flow("a") / "metadata").unlink()
    storage.flow("b")
    assert jobs(follow().start()) == ["b"]
    assert "is left out: " in messages(caplog)[0] and "has no file `metadata`" in messages(caplog)[0]


def test_removed_checkpoint_ends_attachment(storage: Storage, follow: Follow, caplog: pytest.LogCaptureFixture) -> None:
    removed = storage.flow("a")
    other = storage.flow("b", batch=3)
    queries = follow()
    attachments = queries.start()
    is_readable(attachments)
    shutil.rmtree(removed)
    assert list(queries.look()) == []
    assert any(
        "job a: " in line and "was removed; the state in the log stays readable" in line for line in messages(caplog)
    )
    commit(other, 4)
    eventually(lambda: storage.count("b"), lambda count: count == "60")
    assert storage.count("a") == "60"
    storage.flow("a", 0)
    assert jobs(list(queries.look())) == ["a"]


def test_new_query_of_taken_name_waits(storage: Storage, follow: Follow, caplog: pytest.LogCaptureFixture) -> None:
    storage.flow("a")
    queries = follow()
    queries.start()
    other = storage.folder / "_checkpoints/cat/other/a/a/0"
    shutil.copytree(storage.folder / "_checkpoints/cat/db/a/a/0", other)
    assert list(queries.look()) == []
    (line,) = messages(caplog)
    assert line.startswith(
        f"{other} is left out: {storage.folder}/_checkpoints/cat/db/a/a/0 and {other} would both be "
    )
    with pytest.raises(DescriptorError, match="would both be job 'a'"):
        follow().start()


def test_folder_that_cannot_be_listed_is_tried_again(
    storage: Storage, follow: Follow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    storage.flow("a")
    queries = follow()
    queries.start()
    monkeypatch.setattr("state_backend.checkpoint.discovery.FOLDERS_MAX", 1)
    for _ in range(3):
        assert list(queries.look()) == []
    (line,) = messages(caplog)
    assert "cannot look for queries: " in line
    monkeypatch.undo()
    storage.flow("b")
    monkeypatch.setattr(followed_queries, "LOOK_INTERVAL_LOCAL_S", 0.0)
    assert jobs(list(queries.look())) == ["b"]


def test_command_ends_if_no_query_is_left_to_follow(storage: Storage, follow: Follow) -> None:
    only = storage.flow("a")
    queries = follow()
    (attachment,) = queries.start()
    queries.check()
    attachment.error = SparkisError("a row")
    with pytest.raises(SparkisError, match="a row"):
        queries.check()
    storage.flow("b", batch=-1)
    assert list(queries.look()) == []
    queries.check()  # b may begin
    (only / "metadata").write_bytes(b"{")
    shutil.rmtree(only.parent.parent.parent / "b")
    with pytest.raises(SparkisError, match="metadata"):
        follow().start()


def test_start_waits_for_first_commits(storage: Storage, follow: Follow, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sparkis.attach")
    storage.flow("a", batch=-1)
    assert follow().start() == []
    assert messages(caplog) == ["1 queries have no committed micro-batch yet"]
