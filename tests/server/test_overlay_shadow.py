"""Keys whose rule is shadow: the upstream answers, and the states are compared with it."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from compat.conformance.wire import Connection
from compat.waiting import eventually
from state_backend.model.records import Change, Op
from tests.server.overlay import ABSENT, OLD, Overlay, sparkis

RULES = """
[[rule]]
name = "speeds"
keys = "job:speed:<car>"
owner = "shadow"
compare = "number:1e-9"

[[rule]]
name = "board"
keys = "board/<account>"
owner = "shadow"
state_key = "dash/<account>/apdex"
"""


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Overlay]:
    """A proxy of each test's own, whose counts begin anew."""
    with ExitStack() as stack:
        yield Overlay(tmp_path, stack, rules=RULES)


def shadow(overlay: Overlay, rule: str = "speeds") -> dict[str, Any]:
    rows: list[dict[str, Any]] = json.loads(sparkis(overlay.proxy, "shadow", "--json").stdout)
    return next(row for row in rows if row["rule"] == rule)


@pytest.mark.parametrize("protocol", [2, 3])
def test_shadow_answers_as_upstream_and_counts_differences(overlay: Overlay, client: Connection, protocol: int) -> None:
    client.call("HELLO", protocol)
    client.call("MSET", "job:speed:1", "10", "job:speed:2", "20.000000000001", "board/7", "0.9", "board/8", "x")
    client.call("DEL", "job:speed:5")
    assert client.call("GET", "job:speed:1").plain == b"10"
    assert client.call("GET", "job:speed:2").plain == b"20.000000000001"
    keys = ["job:speed:3", "other", "job:speed:5", "job:speed:absent", "job:speed:none"]
    assert client.call("MGET", *keys).plain == [OLD, None, None, OLD, None]
    assert client.call("MGET", "board/7", "board/8").plain == [b"0.9", b"x"]
    assert client.call("TTL", "job:speed:1").plain == -1  # never compared
    eventually(lambda: shadow(overlay)["compared"] == 6 and shadow(overlay, "board")["compared"] == 2)
    found = shadow(overlay)
    counts = ("equal", "different", "missing_in_upstream", "missing_in_state", "skipped", "failed")
    assert [found[name] for name in counts] == [3, 1, 1, 1, 0, 0]
    samples = {each["key"]: each for each in found["samples"]}
    assert samples.keys() == {"job:speed:3", "job:speed:5", ABSENT.decode()}
    sample = samples["job:speed:3"]
    assert [sample[name] for name in ("command", "upstream", "state")] == [
        "GET job:speed:3",
        f'"{OLD.decode()}"',
        '"30"',
    ]
    assert sample["outcome"] == "different" and samples["job:speed:5"]["upstream"] == "(nil)"
    assert sample["epoch"] == 0 and sample["age_ms"] >= 0
    assert [shadow(overlay, "board")[name] for name in counts[:4]] == [1, 0, 0, 1]
    shown = sparkis(overlay.proxy, "shadow").stdout
    assert "speeds  6         3      1" in shown and "missing in state" in shown
    assert f'speeds  different            GET job:speed:3       "{OLD.decode()}"' in shown and "\\r\\n" not in shown
    assert "rule=speeds,compared=6,equal=3,different=1" in overlay.info()["shadow0"]
    assert client.call("SET", "job:speed:1", "11").plain == b"OK" and client.call("GET", "job:speed:1").plain == b"11"


def test_shadow_counts_values_of_different_kinds(overlay: Overlay, client: Connection) -> None:
    client.call("DEL", "job:speed:6")
    client.call("HSET", "job:speed:6", "kmh", "60")
    assert client.call("HGETALL", "job:speed:6").plain == [b"kmh", b"60"]
    assert client.call("GET", "job:speed:6").plain.startswith(b"WRONGTYPE")
    assert client.call("MGET", "job:speed:6", "other").plain == [None, None]
    eventually(lambda: shadow(overlay)["compared"] == 3)
    found = shadow(overlay)
    assert [found[name] for name in ("different", "missing_in_upstream", "failed")] == [2, 1, 0]
    assert any("WRONGTYPE" in each["state"] for each in found["samples"])


def test_shadow_separates_late_from_different(overlay: Overlay, client: Connection) -> None:
    client.call("SET", "job:speed:1", "9")
    assert client.call("GET", "job:speed:1").plain == b"9"
    client.call("SET", "job:speed:1", "10")
    eventually(lambda: shadow(overlay)["compared"] == 1)
    found = shadow(overlay)
    assert (found["equal"], found["upstream_was_behind"], found["state_was_behind"]) == (1, 1, 0)
    assert 0 < found["upstream_behind_ms"] == found["upstream_behind_ms_max"] <= 1500
    assert found["samples"] == []
    assert "1 (average 0." in sparkis(overlay.proxy, "shadow").stdout


def test_shadow_reports_lag_above_a_second(overlay: Overlay, client: Connection) -> None:
    client.call("SET", "job:speed:1", "11")  # the copying job is faster than the state
    assert client.call("GET", "job:speed:1").plain == b"11"
    eventually(lambda: shadow(overlay)["different"] == 1)
    assert shadow(overlay)["samples"][0]["behind"] is None
    overlay.publish(Change("speed", Op.PUT, b"job:speed:2", value=b"20"))
    overlay.publish(Change("speed", Op.PUT, b"job:speed:1", value=b"11"))
    eventually(lambda: shadow(overlay)["state_was_behind"] == 1)
    found = shadow(overlay)
    sample = found["samples"][0]
    assert (sample["behind"], sample["behind_epochs"], sample["epoch"]) == ("state", 2, 0)
    assert 1000 < sample["behind_ms"] == found["state_behind_ms_max"]
    assert (found["state_behind_epochs_max"], found["compared"], found["equal"]) == (2, 1, 0)
    assert "2 epochs" in sparkis(overlay.proxy, "shadow").stdout
    assert f"state_behind_ms_max={sample['behind_ms']},state_behind_epochs_max=2" in overlay.info()["shadow0"]


def test_shadow_reports_lag_of_changing_key(overlay: Overlay, client: Connection) -> None:
    """A key that changes all the time is never equal on both sides."""
    client.call("SET", "job:speed:1", "9")
    assert client.call("GET", "job:speed:1").plain == b"9"
    eventually(lambda: shadow(overlay)["different"] == 1)
    overlay.publish(Change("speed", Op.PUT, b"job:speed:1", value=b"12"))
    with ExitStack() as stack:
        nodes = [stack.enter_context(node.connect()) for node in overlay.nodes]
        eventually(lambda: b"12" in [node.call("GET", "job:speed:1").plain for node in nodes])
        client.call("SET", "job:speed:1", "10")
        eventually(lambda: shadow(overlay)["upstream_was_behind"] == 1)
    sample = shadow(overlay)["samples"][0]
    assert (sample["behind"], sample["behind_epochs"]) == ("upstream", 1)


def test_shadow_comparisons_are_bounded_and_delay_no_client(overlay: Overlay, client: Connection) -> None:
    client.call("SET", "job:speed:1", "10")
    for node in overlay.nodes:
        node.process.send_signal(signal.SIGSTOP)
    try:
        client.send(b"GET job:speed:1\r\n" * 400)
        assert {client.read().plain for _ in range(400)} == {b"10"}
        assert shadow(overlay)["skipped"] == 144
    finally:
        for node in overlay.nodes:
            node.process.send_signal(signal.SIGCONT)
    eventually(lambda: shadow(overlay)["compared"] + shadow(overlay)["failed"] == 256)


def test_shadow_compares_reads_within_transaction(overlay: Overlay, client: Connection) -> None:
    client.call("MSET", "job:speed:1", "10", "job:speed:2", "1", "board/7", "0.9")
    with redis.Redis(port=overlay.proxy.port) as app, app.pipeline() as pipe:
        pipe.get("job:speed:1").set("n", 1).mget("job:speed:2", "n", "job:speed:none").get("board/7").ttl("job:speed:1")
        assert pipe.execute() == [b"10", True, [b"1", b"1", None], b"0.9", -1]
        for _ in range(300):
            pipe.get("job:speed:1").get("dash/7/apdex")  # a transaction over both sides
        assert pipe.execute() == [b"10", b"0.9"] * 300
    eventually(
        lambda: shadow(overlay)["compared"] + shadow(overlay)["skipped"] == 303 and shadow(overlay)["different"] == 1
    )
    assert shadow(overlay)["equal"] == shadow(overlay)["compared"] - 1 and 44 <= shadow(overlay)["skipped"] < 60
    eventually(lambda: shadow(overlay, "board")["equal"] == 1)
    assert shadow(overlay)["samples"][0]["key"] == "job:speed:2"


def test_shadow_counts_survive_reload_of_other_rules(overlay: Overlay, client: Connection) -> None:
    client.call("GET", "job:speed:none")
    eventually(lambda: shadow(overlay)["compared"] == 1)
    overlay.use_rules(RULES.replace("board/<account>", "boards/<account>"))
    assert shadow(overlay)["compared"] == 1
