"""ioredis and node-redis, with their default settings unless a test says otherwise. The scenarios are in their .mjs."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from compat.conformance.dataset import LATER_MS, Dataset
from compat.conformance.servers import Running

READONLY = "READONLY You can't write against a read only replica."
WRONGTYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
UNKNOWN = "ERR unknown command 'NOPE', with args beginning with: 'a' "

pytestmark = pytest.mark.parametrize("script", ["ioredis.mjs", "node_redis.mjs"])


def test_javascript_client_reads_every_kind(script: str, run_script: Any, sparkis: Running, dataset: Dataset) -> None:
    found = run_script(script, "reads", sparkis)
    assert base64.b64decode(found.pop("bytes")) == dataset.strings[b"\x00\xff\r\n\x80"]
    assert found == {
        "get": "value",
        "missing": None,
        "mget": ["42", None, None, ""],
        "hgetall": {f"f{number}": f"v{number}" for number in range(10)},
        "none": {},
        "hmget": ["value", None],
        "lrange": ["a", "b", "a", "c", "", "a", "b"],
        "ttl": [-1, -2, LATER_MS],
        "type": "hash",
        "exists": 1,
        "dbsize": len(dataset.keys),
    }


def test_older_protocol_is_spoken_too(script: str, run_script: Any, sparkis: Running) -> None:
    assert run_script(script, "resp2", sparkis) == {"get": "value", "hgetall": {"field": "value"}}


def test_scans_find_everything(script: str, run_script: Any, sparkis: Running, dataset: Dataset) -> None:
    found = run_script(script, "streams", sparkis)
    assert sorted(found["keys"]) == [f"many:{number:03d}" for number in range(300)]
    assert (found["all"], found["fields"], found["value"]) == (len(dataset.keys), 1500, "value 42")


def test_pipeline_answers_in_order_errors_included(script: str, run_script: Any, sparkis: Running) -> None:
    assert run_script(script, "pipeline", sparkis) == ["value", WRONGTYPE, READONLY, "value"]


def test_calls_at_same_time_are_each_answered(script: str, run_script: Any, sparkis: Running) -> None:
    assert run_script(script, "autoPipelining", sparkis) == [str(number) for number in range(300)]


def test_refusals_reach_caller_and_connection_continues(script: str, run_script: Any, sparkis: Running) -> None:
    found = run_script(script, "refusals", sparkis)
    assert (found["set"], found["type"], found["unknown"], found["after"]) == (READONLY, WRONGTYPE, UNKNOWN, "value")
    assert found["multi"] == "no error"


def test_name_and_database_are_taken(script: str, run_script: Any, sparkis: Running) -> None:
    found = run_script(script, "settings", sparkis)
    assert (found["name"], found["get"]) == ("a-name", None)
    assert "lib-name" in str(found["info"]) or "libName" in str(found["info"])


def test_right_password_is_accepted_and_wrong_one_refused(script: str, run_script: Any, locked_sparkis: Running) -> None:
    found = run_script(script, "password", locked_sparkis, locked_sparkis.password)
    assert (found["get"], found["named"]) == ("value", "value")
    assert found["wrong"] != "no error"


def test_client_connects_again_after_restart(script: str, run_script: Any, restartable: Any) -> None:
    found = run_script(script, "reconnect", restartable, meanwhile=restartable.restart)
    assert found == {"before": "value", "after": "value"}


def test_clients_of_all_workers_are_listed_and_can_be_killed(
    script: str, run_script: Any, several_workers: Running
) -> None:
    assert run_script(script, "killing", several_workers) == {"all": True, "killed": 1, "other": "value"}
