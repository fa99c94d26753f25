"""`sparkis inspect LOG` shows each job, also one that is damaged, and says where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spark_hooks.cli import main
from state_backend.apply.compact import compact_log
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

STATE = StateDescriptor("temp", key="k", value="v")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    for job in ("a", "b"):
        with LogWriter(
            tmp_path / "log", job, [STATE.for_job(job)], f"q-{job}", checkpoint=f"/checkpoints/{job}"
        ) as writer:
            for number in range(3):
                writer.publish([Change("temp", Op.PUT, b"%s:temp:k" % job.encode(), None, b"%d" % number)])
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


def test_a_damaged_job_is_an_error_among_the_others(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (generation,) = (path for path in (log / "b").iterdir() if path.name.startswith("q-b."))
    (generation / "epochs" / "2.json").write_text("damaged")
    assert main(["inspect", str(log)]) == 0
    assert "\n  error       " in capsys.readouterr().out
    assert main(["inspect", str(log), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["job"], first["epochs"], "error" in first) == ("a", {"first": 2, "last": 2, "count": 1}, False)
    assert "2.json is not a complete epoch file" in second["error"]


def test_what_is_not_there_is_named(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(log), "--job", "c"]) == 1
    assert "has no job 'c'; jobs: a, b" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path)]) == 1
    assert "is neither a query's checkpoint" in capsys.readouterr().err
