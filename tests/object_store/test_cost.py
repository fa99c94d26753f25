"""What a job and a server in an S3 bucket ask of it, and what that costs by list prices."""

from __future__ import annotations

import math
import os
from collections import Counter
from pathlib import Path
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

import pytest

from compat.object_store.faulty_proxy import FaultyProxy
from state_backend.apply import applier as applier_module
from state_backend.apply.applier import Applier, follow_until_end
from state_backend.log import heartbeat_writer
from state_backend.log.change_log import ChangeLog
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

# As long as readers look without a listing of all epochs, and one of these.
WATCHED_S = 900
A_MONTH_S = 730 * 3600
# US dollars, S3 Standard, us-east-1.
DOLLARS = {"PUT": 5e-6, "POST": 5e-6, "LIST": 5e-6, "GET": 4e-7, "HEAD": 4e-7}
STATE = StateDescriptor("count", key="k", value="v")


def requests(proxy: FaultyProxy) -> Counter[str]:
    return Counter("LIST" if "list-type" in path else method for method, path in proxy.taken())


def a_month(cost: Counter[str]) -> float:
    return A_MONTH_S / WATCHED_S * sum(DOLLARS[method] * count for method, count in cost.items())


@pytest.mark.parametrize(
    ("every_s", "is_told", "dollars_max"),
    [
        pytest.param(None, False, 2.0, id="at rest"),
        pytest.param(10, True, 5.0, id="an epoch every ten seconds, told by the driver", marks=pytest.mark.slow),
        pytest.param(10, False, 7.0, id="an epoch every ten seconds, found by looking", marks=pytest.mark.slow),
    ],
)
def test_requests_of_month_cost_little(
    proxy: FaultyProxy,
    root: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    every_s: int | None,
    is_told: bool,
    dollars_max: float,
) -> None:
    """The time passes as fast as the requests are done: only the waiting is left out."""
    now_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: now_s, perf_counter_ns=perf_counter_ns, sleep=lambda pause_s: None)
    monkeypatch.setattr(applier_module, "time", clock)
    monkeypatch.setattr(heartbeat_writer, "time", clock)
    writer = LogWriter(root, "job", [STATE], "q1")
    epoch = writer.publish([Change("count", Op.PUT, b"job:count:a", None, b"1")])
    events: list[dict[str, Any]] = []
    applier = Applier(ChangeLog(root), "job", tmp_path, events.append)
    applier.step()
    proxy.taken()
    reading, writing = os.pipe()

    def wait(lines: list[int], _: Any, __: Any, timeout_s: float) -> tuple[list[int], list[int], list[int]]:
        """Let the time pass, from one full second to the next, with what the driver does then."""
        nonlocal now_s, epoch
        ends_s = now_s + timeout_s
        while now_s < ends_s:
            if now_s >= WATCHED_S:
                os.close(writing)
                return lines, [], []
            now_s, before_s = min(ends_s, math.floor(now_s) + 1), now_s
            if math.floor(now_s) == math.floor(before_s):
                continue
            writer.send_heartbeat()
            if every_s is not None and math.floor(now_s) % every_s == 0:
                epoch = writer.publish([Change("count", Op.PUT, b"job:count:a", None, b"%d" % int(now_s))])
                if is_told:
                    os.write(writing, b"epoch 1 %d\n" % epoch)
                    return lines, [], []
        return [], [], []

    monkeypatch.setattr(applier_module, "select", SimpleNamespace(select=wait))
    follow_until_end(applier, reading, 1.0)
    os.close(reading)
    shown = {name: value for event in events for name, value in event.items()}
    assert (shown["is_stale"], shown["error"]) == (False, "")
    assert shown["applied"] >= epoch - 1
    log = ChangeLog(root)  # a server keeps its own
    for _ in range(WATCHED_S // int(log.filesystem.jobs_interval_s_max)):
        assert log.jobs() == ["job"]
    applier.close()
    assert a_month(requests(proxy)) < dollars_max
