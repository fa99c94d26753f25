"""docs/clients-speed.md says what benchmarks/results.json says of clients."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.clients import speed_page
from benchmarks.clients.places import OF_UPSTREAM, SERVE
from benchmarks.clients.programs import PROGRAMS
from benchmarks.results import Row, load

FAST = Row(
    name=f"go-redis, {SERVE}, GET",
    part="clients",
    ours=200.0,
    unit="calls/s",
    better="more",
    peer=100.0,
    ratio=2.0,
    low=1.5,
    high=2.5,
    budget=0.5,
    ours_cpu_us=1.26,
    peer_cpu_us=22.4,
    note="9.1",
)
SLOW = replace(FAST, name=f"go-redis, {SERVE}, SET", ratio=0.4)
OF_ANOTHER = replace(FAST, name=f"redis-rs, {OF_UPSTREAM}, GET", note="1.8")


def test_page_has_current_results() -> None:
    written = speed_page.PAGE.read_text()
    assert speed_page.text_of(written, load()) == written, "run: python -m benchmarks page"


def test_each_client_has_its_lowest_ratio_at_place_and_cell_for_each_workload() -> None:
    lines = speed_page.tables([FAST, SLOW, OF_ANOTHER]).splitlines()
    assert "| go-redis 9.1 | 0.40 ✗: SET |  |  |  |" in lines
    assert "| redis-rs 1.8 |  |  |  | 2.00: GET |" in lines
    assert "| go-redis | 2.00 (1.3 / 22) | 0.40 ✗ (1.3 / 22) |" in lines
    assert "| redis-rs |  |  |" in lines


def test_each_program_names_version_of_its_client() -> None:
    assert all(each.version()[0].isdigit() for each in PROGRAMS)
