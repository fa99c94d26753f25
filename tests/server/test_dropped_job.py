"""A server shows nothing of a job that was dropped, and goes on with one whose folder is just not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from compat.conformance.servers import sparkis_server
from compat.conformance.wire import Connection
from compat.waiting import eventually
from state_backend.log.drop import drop
from state_backend.model.descriptor import StateDescriptor
from tests.builders import put_value, write_log

STATE = StateDescriptor("temp", key="k", value="v")


def publish(log: Path, job: str, value: bytes) -> None:
    write_log(log, job, [STATE], [put_value("temp", f"{job}:temp:a".encode(), value)], query_id=f"query-of-{job}")


def jobs(client: Connection) -> dict[bytes, dict[bytes, bytes]]:
    rows = [dict(zip(row[::2], row[1::2], strict=True)) for row in client.call("STATE", "LAG").plain]
    return {row[b"job"]: row for row in rows}


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_dropped_job_is_gone_and_unreadable_one_is_stale(tmp_path: Path, workers: str) -> None:
    log = tmp_path / "log"
    for job in ("dropped", "away"):
        publish(log, job, b"1")
    with sparkis_server(tmp_path / "store", log, "--workers", workers) as server, Connection(server.port) as client:

        def look(*keys: str) -> list[bytes | None]:
            return client.call("MGET", *(f"{key}:temp:a" for key in keys)).plain

        assert look("dropped", "away") == [b"1", b"1"]
        drop(log, "dropped")
        (log / "away").rename(tmp_path / "aside")
        eventually(lambda: list(jobs(client)), lambda names: names == [b"away"])
        assert look("dropped", "away") == [None, b"1"]
        eventually(lambda: jobs(client)[b"away"][b"error"], lambda error: b"is missing in the log" in error)
        assert b"sparkis drop" in jobs(client)[b"away"][b"error"]
        eventually(lambda: (tmp_path / "store" / "dropped").exists(), lambda is_there: not is_there)

        (tmp_path / "aside").rename(log / "away")
        publish(log, "away", b"2")
        publish(log, "dropped", b"3")
        eventually(lambda: look("dropped", "away"), lambda found: found == [b"3", b"2"])
        eventually(lambda: jobs(client)[b"away"][b"error"], lambda error: not error)
