"""`sparkis inspect LOG` shows each job, also one that is damaged, and says where there is none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest

from spark_hooks.cli import main
from state_backend.apply.compact import compact_log
from state_backend.log.change_log import ChangeLog
from state_backend.log.inspection import facts_of, facts_of_log, lines_of
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

STATE = StateDescriptor("temp", key="k", value="v")


def value_of(job: str, number: int) -> Change:
    return Change("temp", Op.PUT, b"%s:temp:k" % job.encode(), None, b"%d" % number)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    for job in ("a", "b"):
        with LogWriter(
            tmp_path / "log", job, [STATE.for_job(job)], f"q-{job}", checkpoint=f"/checkpoints/{job}"
        ) as writer:
            for number in range(3):
                writer.publish([value_of(job, number)])
    compact_log(str(tmp_path / "log"), "a", 0)
    return tmp_path / "log"


def test_each_job_is_shown(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(log)]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    assert first.splitlines()[0] == "job a"
    for text in ("state       temp, value, a:temp:<k>", "epochs      2 to 2\n", "snapshot    epoch 2, 1 changes in "):
        assert text in first
    assert "checkpoint  /checkpoints/a" in first
    assert "epochs      0 to 2\n" in second
    assert "readable    from epoch 2 on, " in first
    assert "readable    from epoch 0 on, " in second
    assert "snapshot" not in second


def test_job_is_shown_with_its_writer_its_epochs_and_their_bytes(tmp_path: Path) -> None:
    with LogWriter(tmp_path, "job", [STATE], "q", checkpoint="/checkpoints/q") as writer:
        for number in range(3):
            writer.publish([value_of("job", number), value_of("job", number)], clock_ms=number * 1000)
        compact_log(str(tmp_path), "job", 0)
        writer.publish([value_of("job", 3)], clock_ms=3_500)
        writer.send_heartbeat()
        job = writer.log
        (snapshot,) = job.snapshots(writer.current)
        before, last = job.epoch(writer.current, 2), job.epoch(writer.current, 3)
        assert before is not None
        assert last is not None
        assert facts_of_log(str(tmp_path), "job") == [
            {
                "job": "job",
                "generation": "q.1",
                "term": 1,
                "held_back": None,
                "writer": f"host {gethostname()}, pid {os.getpid()}",
                "checkpoint": "/checkpoints/q",
                "is_running": True,
                "states": [{"name": "temp", "kind": "value", "key_format": "job:temp:<k>"}],
                "epochs": {"first": 2, "last": 3, "count": 2},
                "snapshots": [{"epoch": 2, "changes": 1, "bytes": snapshot.change_bytes}],
                "readable_from": {"epoch": 2, "committed_at": "1970-01-01T00:00:02.000Z"},
                "last_epoch": {"committed_at": "1970-01-01T00:00:03.500Z", "changes": 1, "bytes": last.change_bytes},
                "bytes_of_all_changes": 3 * before.change_bytes + last.change_bytes,
            }
        ]


def test_facts_of_job_are_line_each() -> None:
    facts: dict[str, Any] = {
        "job": "job",
        "generation": "q.1",
        "term": 2,
        "held_back": None,
        "writer": "host h, pid 5",
        "checkpoint": "/checkpoints/q",
        "is_running": True,
        "states": [{"name": "temp", "kind": "value", "key_format": "job:temp:<k>"}],
        "epochs": {"first": 2, "last": 9, "count": 8},
        "snapshots": [{"epoch": 7, "changes": 3, "bytes": 70}, {"epoch": 4, "changes": 2, "bytes": 40}],
        "readable_from": {"epoch": 4, "committed_at": "then"},
        "last_epoch": {"committed_at": "now", "changes": 6, "bytes": 60},
        "bytes_of_all_changes": 500,
    }
    assert list(lines_of(facts)) == [
        "job job",
        "  generation  q.1, term 2",
        "  writer      host h, pid 5: running at its last heartbeat",
        "  checkpoint  /checkpoints/q",
        "  state       temp, value, job:temp:<k>",
        "  epochs      2 to 9",
        "  readable    from epoch 4 on, then",
        "  all changes 500 bytes since the beginning of the log",
        "  last epoch  now, 6 changes in 60 bytes",
        "  snapshot    epoch 7, 3 changes in 70 bytes",
        "  snapshot    epoch 4, 2 changes in 40 bytes",
    ]
    unknown = {"writer": None, "checkpoint": None, "is_running": False, "held_back": "r.3", "epochs": None}
    assert list(lines_of({name: facts[name] for name in ("job", "generation", "term")} | unknown)) == [
        "job job",
        "  generation  q.1, term 2; r.3 is held back",
        "  writer      unknown: stopped, or without heartbeats",
    ]
    assert list(lines_of({"job": "job", "error": "damaged"})) == ["job job", "  error       damaged"]


def test_job_without_epochs_and_one_that_was_dropped_are_shown(tmp_path: Path) -> None:
    LogWriter(tmp_path, "job", [STATE], "q", sends_heartbeats=False)
    (facts,) = facts_of_log(str(tmp_path), None)
    assert (facts["epochs"], facts["snapshots"], facts["is_running"]) == (None, [], False)
    assert not {"readable_from", "last_epoch", "error"} & set(facts)
    assert facts_of(ChangeLog(tmp_path).job("other")) == {"job": "other", "error": "the job was dropped"}


def test_writer_of_held_back_generation_is_not_one_before(tmp_path: Path) -> None:
    with LogWriter(tmp_path, "job", [STATE], "old", checkpoint="/checkpoints/old") as writer:
        writer.publish([value_of("job", 1)])
    with LogWriter(tmp_path, "job", [STATE], "new", checkpoint="/checkpoints/new", holds_back=True) as writer:
        writer.send_heartbeat()
        (facts,) = facts_of_log(str(tmp_path), "job")
        assert (facts["generation"], facts["held_back"]) == ("old.1", "new.2")
        assert (facts["checkpoint"], facts["is_running"]) == ("/checkpoints/old", False)
        writer.publish([value_of("job", 2)])
        writer.promote("it is whole")
        (facts,) = facts_of_log(str(tmp_path), "job")
        assert (facts["generation"], facts["held_back"]) == ("new.2", None)
        assert (facts["checkpoint"], facts["is_running"]) == ("/checkpoints/new", True)


def test_damaged_job_is_error_among_others(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (generation,) = (path for path in (log / "b").iterdir() if path.name.startswith("q-b."))
    (generation / "epochs" / "2.json").write_text("damaged")
    assert main(["inspect", str(log)]) == 0
    assert "\n  error       " in capsys.readouterr().out
    assert main(["inspect", str(log), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["job"], first["epochs"], "error" in first) == ("a", {"first": 2, "last": 2, "count": 1}, False)
    assert "2.json is not a complete file of a log" in second["error"]


def test_missing_log_is_named(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(log), "--job", "c"]) == 1
    assert "has no job 'c'; jobs: a, b" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path)]) == 1
    assert "is neither a query's checkpoint" in capsys.readouterr().err
