"""A server of a past moment, read by a real client."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import redis

from compat.conformance.servers import sparkis_server
from compat.waiting import eventually
from state_backend.apply.compact import compact_log
from state_backend.log.log_writer import LogWriter
from state_backend.model.clock import iso_text
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

STATE = StateDescriptor("temp", key="k", value="v")
START_MS = 1_700_000_000_000
TTL_MS = 10_000


def publish(log: Path, job: str, epochs: int, start_ms: int = START_MS) -> None:
    """Publish one epoch a second: epoch N sets `a` to N, and key `kN`, which expires after ten seconds."""
    with LogWriter(log, job, [STATE], f"query-of-{job}") as writer:
        for number in range(epochs):
            now_ms = start_ms + number * 1000
            writer.publish(
                [
                    Change("temp", Op.PUT, f"{job}:temp:a".encode(), None, b"%d" % number),
                    Change("temp", Op.PUT, f"{job}:temp:k{number}".encode(), None, b"v", now_ms + TTL_MS),
                ],
                clock_ms=now_ms,
            )


@pytest.mark.parametrize("workers", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_past_epoch_is_served_and_does_not_change(tmp_path: Path, workers: str) -> None:
    log, store = tmp_path / "log", tmp_path / "store"
    store.mkdir()
    publish(log, "job", 20)
    options = ("--as-of", "12", "--workers", workers)
    with sparkis_server(store, log, *options) as server, redis.Redis(port=server.port, decode_responses=True) as client:
        assert client.get("job:temp:a") == "12"
        assert client.get("job:temp:k2") is None, "it had expired at the epoch's time"
        assert client.pttl("job:temp:k3") == 1_000
        assert client.ttl("job:temp:k12") == 10
        assert client.get("job:temp:k13") is None
        eventually(client.dbsize, lambda count: count == 11)  # keys that had expired are subtracted within a second
        publish(log, "job", 1, START_MS + 20_000)
        (fields,) = client.execute_command("STATE", "JOBS")
        assert (fields["applied"], fields["committed"]) == (12, 12)
        assert fields["as_of"] == iso_text(START_MS + 12_000)
        assert client.info("sparkis")["job_job"]["as_of"] == fields["as_of"]
        with pytest.raises(redis.ResponseError, match="read only replica"):
            client.set("job:temp:a", "x")


def test_time_selects_newest_epoch_of_each_job_up_to_it(tmp_path: Path) -> None:
    log, store = tmp_path / "log", tmp_path / "store"
    store.mkdir()
    publish(log, "early", 5)
    publish(log, "late", 5, START_MS + 2_000)
    publish(log, "not_yet", 5, START_MS + 60_000)
    publish(log, "none_yet", 0)
    options = ("--as-of", iso_text(START_MS + 3_500))
    with sparkis_server(store, log, *options) as server, redis.Redis(port=server.port, decode_responses=True) as client:
        assert client.mget("early:temp:a", "late:temp:a", "not_yet:temp:a") == ["3", "1", None]


def error_of(*options: str) -> str:
    command = [sys.executable, "-m", "resp_server.programs.serve", "--port", "0", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    return ended.stderr


def test_missing_past_epoch_is_named(tmp_path: Path) -> None:
    log = tmp_path / "log"
    publish(log, "job", 8)
    compact_log(str(log), "job", retention_ms=0)
    options = ("--log", str(log), "--as-of")
    assert "epoch 3 cannot be read any more: the log reaches back to epoch 7, of 2023-11-14T22:13:27.000Z" in error_of(
        *options, "3"
    )
    assert "epoch 9 is not committed; the last one is 7" in error_of(*options, "9")
    publish(log, "other", 2)
    assert "the jobs job, other; name one with --job, or give a time" in error_of(*options, "1")
    said = error_of(*options, "1", "--job", "other", "--upstream", "redis://127.0.0.1:1", "--compact", "yes")
    assert "--as-of cannot be combined with --upstream" in said
    assert "--as-of cannot be combined with --compact yes" in said
