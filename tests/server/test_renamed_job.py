"""Servers follow a job that gets another name: new keys come as the old ones go, and others are there all the time."""

from __future__ import annotations

from pathlib import Path

import pytest

from compat.conformance.servers import sparkis_server
from compat.conformance.wire import Connection
from compat.waiting import eventually
from state_backend.apply.rename import rename
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from tests.builders import put_value, write_log

STATES = [StateDescriptor("temp", key="k", value="v"), StateDescriptor("planes", key_format="plane/<k>", value="v")]


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_server_follows_renamed_job(tmp_path: Path, workers: str) -> None:
    log = tmp_path / "log"
    changes = [Change("temp", Op.PUT, b"old:temp:a", None, b"1"), Change("planes", Op.PUT, b"plane/7", None, b"B737")]
    write_log(log, "old", STATES, changes, query_id="q")
    with sparkis_server(tmp_path / "store", log, "--workers", workers) as server, Connection(server.port) as client:
        planes: set[bytes] = set()

        def look() -> list[bytes | None]:
            planes.add(client.call("GET", "plane/7").value)
            values = [client.call("GET", key) for key in ("old:temp:a", "new:temp:a")]
            return [b"?" if value.is_error else value.value for value in values]

        assert look() == [b"1", None]
        rename(log, "old", "new")
        eventually(look, lambda found: found == [None, b"1"])
        eventually(lambda: (tmp_path / "store" / "old").exists(), lambda is_there: not is_there)
        assert look() == [None, b"1"]
        assert planes == {b"B737"}
        jobs = {job[b"job"]: job for job in map(as_map, client.call("STATE", "LAG").plain)}
        assert list(jobs) == [b"new"]
        # A query may have the name that is free now.
        write_log(log, "old", STATES[:1], changes[:1], query_id="p")
        eventually(look, lambda found: found == [b"1", b"1"])
        write_log(log, "new", STATES, [put_value("temp", b"new:temp:a", b"2")], query_id="q")
        eventually(look, lambda found: found == [b"1", b"2"])
    with sparkis_server(tmp_path / "other", log) as server, Connection(server.port) as client:
        assert client.call("MGET", "old:temp:a", "new:temp:a", "plane/7").plain == [b"1", b"2", b"B737"]


def as_map(pairs: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(pairs[::2], pairs[1::2], strict=True))
