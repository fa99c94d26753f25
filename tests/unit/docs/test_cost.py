"""The page about costs: its table follows from its unit costs, and those of sparkis are those of `sparkis size`."""

from __future__ import annotations

import math
import re
from pathlib import Path

from resp_server.programs import unit_costs
from resp_server.programs.sizing import Load, estimate, store_bytes_of_a_key

PAGE = (Path(__file__).parents[3] / "docs" / "cost.md").read_text()
LOAD = Load(keys=100e6, updates=71e6 / 60, reads=1e6, pipeline=16, replicas=1)
SIZE = estimate(LOAD)
# Of redis-server, as on the page.
CHANGE_US, GET_US, KEY_BYTES = 0.98, 1.1, 128
# A bulk string of a key, and one of a value, in an MSET.
SET_BYTES = len(b"$24\r\n\r\n$17\r\n\r\n") + 24 + 17


def row(name: str) -> tuple[str, str]:
    """Return the columns of a row: sparkis and Redis."""
    (found,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \| (.*) \|$", PAGE, re.MULTILINE)
    return found


def test_unit_costs_of_sparkis_are_those_that_are_measured() -> None:
    gets = " / ".join(f"{cost.value:g}" for cost in unit_costs.GET_AT_A_SERVER.values())
    assert row("a GET, alone / in pipelines of 16 / of 100") == (f"{gets} µs", f"7.9 / {GET_US} / 0.72 µs")
    assert row("a changed value, at each server that has it") == (f"{unit_costs.APPLYING.value} µs", f"{CHANGE_US} µs")
    key = f"{store_bytes_of_a_key(LOAD):.0f} bytes"
    assert row("a key with a short value, in memory") == (f"what is read often of {key}", f"{KEY_BYTES} bytes")


def test_servers_and_cores_follow_from_unit_costs() -> None:
    masters = math.ceil((LOAD.updates * CHANGE_US + LOAD.reads * GET_US) / 1e6 / LOAD.share_used)
    assert row("servers, of a core or two each") == (str(SIZE.servers), str(2 * masters))
    ours = 2 * SIZE.applying_cores + SIZE.serving_cores
    theirs = (2 * LOAD.updates * CHANGE_US + LOAD.reads * GET_US) / 1e6
    assert row("cores that are busy in them") == (f"{ours:.1f}", f"{theirs:.1f}")
    written = [LOAD.updates * us / 1e6 for us in (2.1, 7.5, 2.8)]
    assert row("cores of executors that write") == (
        f"{written[0]:.1f}",
        f"{written[1]:.1f}, or {written[2]:.1f} with Arrow",
    )
    assert f"it counts {SIZE.writing_cores_all:.1f} cores of executors" in PAGE
    assert row("a proxy for plain clients, cores")[0] == f"{LOAD.reads * unit_costs.GET_AT_A_PROXY[16].value / 1e6:g}"


def test_memory_disk_and_network_follow_from_unit_costs() -> None:
    redis = f"{2 * LOAD.keys * KEY_BYTES / 1e9:.1f} GB"
    assert row("memory, all keys in it") == (f"{2 * SIZE.memory_bytes / 1e9:.1f} GB", redis)
    assert row("memory at least") == (f"{2 * SIZE.memory_bytes_min / 1e9:.1f} GB", redis)
    assert row("disk of servers")[0] == f"{2 * SIZE.disk_bytes / 1e9:.0f} GB"
    into, out = SIZE.log_bytes_per_s / 1e6, SIZE.log_read_bytes_per_s_all / 1e6
    assert row("network for updates") == (
        f"{into:.0f} MB/s into the log, {out:.0f} MB/s out of it",
        f"{LOAD.updates * SET_BYTES / 1e6:.0f} MB/s, and as much to replicas",
    )


def test_log_and_its_price_follow_from_unit_costs() -> None:
    none = estimate(Load(keys=100e6, updates=71e6 / 60, reads=1e6, pipeline=16, replicas=1, retention_minutes=0))
    kept = f"{SIZE.log_bytes_max / 1e9:.0f} GB / {none.log_bytes_max / 1e9:.0f} GB"
    assert row("the log, with a retention of an hour / of none")[0] == kept
    puts = SIZE.log_files_per_s * 730 * 3600 / 1e6
    assert f"are {puts:.0f} million PUTs a month: {puts * 5 / 10:.0f}0 dollars" in PAGE
    assert f"{puts * 0.4 / 10:.0f}0 for the reads of each server" in PAGE.replace("\n  ", " ")
