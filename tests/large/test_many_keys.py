"""Ten million keys in one state: applied, opened, counted, scanned, changed a little."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from compat.page.browser import page_of
from compat.waiting import WAIT_S_MAX
from resp_server.protocol.replies import encode
from sparkis_ui.values import SCAN_STEPS_MAX
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from tests.large.conftest import publish_values

pytestmark = pytest.mark.large

KEYS = 10_000_000
STATES = (StateDescriptor("v", key="k", value="v"),)
KEY_COUNT_REPLY = b":%d\r\n" % KEYS


def key(number: int) -> bytes:
    return b"job:v:%08d" % number


def test_ten_million_keys_are_read(tmp_path: Path, report: Any, serve_measured: Callable[..., Any]) -> None:
    log = tmp_path / "log"
    with LogWriter(log, "job", STATES) as writer:
        with report.timed("written to the log", KEYS):
            publish_values(writer, KEYS, "value of ")
        with serve_measured(log) as server:
            with report.timed("applied", KEYS):
                server.until("DBSIZE", reply=KEY_COUNT_REPLY)
            size = sum(path.stat().st_blocks * 512 for path in (tmp_path / "stores").rglob("data.mdb"))
            report("file", bytes_per_key=size / KEYS)
            report("memory after the epoch", server=server.memory(), applier=server.applier_memory())
            _ask(server)
            with report.timed("a hundred epochs of 100 keys", 100):
                for epoch in range(100):
                    writer.publish(Change("v", Op.PUT, key(n * 7919), None, b"%d" % epoch) for n in range(100))
                server.until("GET", key(0), reply=encode(b"99", 2))
            report("memory", server=server.memory(), applier=server.applier_memory())
        with report.timed("opened again"), serve_measured(log) as server:
            server.until("DBSIZE", reply=KEY_COUNT_REPLY)
            assert server.ask("GET", key(0)) == encode(b"99", 2)
            time.sleep(3)
            report("longest turn since the start", **server.turns())
            report("memory", server=server.memory(), applier=server.applier_memory())
            with page_of(f"redis://127.0.0.1:{server.port}") as url, httpx.Client(base_url=url) as browser:
                _browse(server, browser, report)


def _browse(server: Any, browser: httpx.Client, report: Any) -> None:
    """Look for a few keys on the page of `sparkis ui`: nothing but steps of SCAN, each page within its bounds."""
    browser.get("/browse?pattern=none")
    before, link, pages = _calls(server), "/browse?pattern=job:v:0*99991", 0
    server.turns()
    with report.timed("ten pages of a search"):
        while link and pages < 10:
            page = browser.get(link, timeout=WAIT_S_MAX).text
            found = re.search(r'rel="next" href="([^"]+)"', page)
            link, pages = found[1].replace("&amp;", "&") if found else "", pages + 1
    report("longest turn of the search", **server.turns())
    spent = {name: calls - before.get(name, 0) for name, calls in _calls(server).items()}
    assert pages <= spent["scan"] <= pages * SCAN_STEPS_MAX
    assert not {"keys", "get", "mget", "dbsize"} & {name for name, calls in spent.items() if calls}


def _calls(server: Any) -> dict[str, int]:
    found = re.findall(r"cmdstat_(\S+):calls=(\d+)", server.ask("INFO", "commandstats").decode())
    return {name: int(calls) for name, calls in found}


def _ask(server: Any) -> None:
    assert server.ask("DBSIZE", show="DBSIZE") == KEY_COUNT_REPLY
    server.ask("RANDOMKEY", show="RANDOMKEY")
    server.ask("INFO", show="INFO")
    server.ask("SCAN", 0, show="SCAN")
    server.ask("SCAN", 0, "COUNT", 4096, show="SCAN COUNT 4096")
    # KEYS is given up after a minute, which a busy machine may need for so many keys.
    for pattern, count_of in (("*00007", 100), ("*", KEYS)):
        found = server.ask("KEYS", pattern, show=f"KEYS {pattern}")
        assert found.startswith((b"*%d\r\n$14\r\n" % count_of, b"-ERR the reply was not complete after 6"))
    seen = 0
    cursor = b"0"
    for _ in count():
        lines = server.ask("SCAN", cursor, "COUNT", 4096).split(b"\r\n")
        seen += int(lines[3][1:])
        cursor = lines[2]
        if cursor == b"0":
            break
    assert seen == KEYS
