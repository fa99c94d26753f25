"""What a load needs: the numbers are those of the pages, and `sparkis size` prints them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from resp_server.programs import unit_costs
from resp_server.programs.sizing import (
    Load,
    SizeError,
    change_bytes,
    estimate,
    reply_bytes,
    request_bytes,
    store_bytes_of_a_key,
)
from spark_hooks.cli import main

ROOT = Path(__file__).parents[4]
# The load of docs/scale.md, whose tables leave no reserve.
AT_SCALE = Load(keys=100e6, updates=71e6 / 60, reads=10e6, share_used=1.0)
COMMAND = ["size", "--keys", "100M", "--updates", "71M/min", "--reads", "10M/s"]


def page(name: str) -> str:
    """Return a page's text in one line."""
    return " ".join((ROOT / name).read_text().split())


@pytest.mark.parametrize("cost", unit_costs.ALL, ids=lambda cost: cost.meaning)
def test_page_of_cost_has_its_words(cost: unit_costs.Cost) -> None:
    assert cost.words in page(cost.page)


def test_numbers_of_pages_follow_from_costs() -> None:
    scale = page("docs/scale.md")
    measured = Load(keys=1, updates=1, reads=1)
    assert change_bytes(measured) == 72 and change_bytes(replace(measured, key_bytes=30, value_bytes=20)) == 81
    assert "| 72 bytes; one file" in scale and "81 bytes with 30 and 20" in scale
    assert int(store_bytes_of_a_key(measured)) == 108 and "| 108 bytes |" in scale
    mb = [cost.value / 1e6 for cost in (unit_costs.SUPERVISOR, unit_costs.SERVER, unit_costs.APPLIER)]
    assert "| {:g} + {:g} + {:g} MB |".format(*mb) in scale
    assert f"| a registry | {unit_costs.REGISTRY.value / 1e6:g} MB" in scale


def test_estimate_of_71_million_updates_a_minute_is_that_of_page() -> None:
    section = page("docs/scale.md").partition("## 71 million updates a minute")[2].partition("## 10 million reads")[0]
    size = estimate(replace(AT_SCALE, reads=0))
    assert f"{size.writing_cores_all:.1f} cores of executors" in section
    assert f"{size.log_bytes_per_s / 1e6:.0f} MB/s to the log's storage" in section
    assert f"{size.log_files_per_s:.0f} new files a second" in section
    assert f"{size.store_bytes_all / 1e9:.0f} GB of store for each 100 million" in section
    assert size.shards == 1 and "**one server at least**" in section
    assert f"{size.applying_cores:.1f} cores in all" in section
    in_python = estimate(replace(AT_SCALE, reads=0, in_python=True, share_used=1.0))
    assert f"need 6 cores, and with the reading of other servers' changes {in_python.shards} servers" in section


@pytest.mark.parametrize("pipeline", [1, 16, 100])
def test_table_of_10_million_reads_is_that_of_page(pipeline: int) -> None:
    size = estimate(replace(AT_SCALE, pipeline=pipeline, updates=0))
    how = "one request at a time" if pipeline == 1 else f"pipelines of {pipeline}"
    table = page("docs/scale.md").partition("## 10 million reads a second")[2]
    assert f"| cluster clients, {how} | {size.servers} | none |" in table
    assert re.search(rf"\| plain clients through proxies, {how} \| {size.servers} \| {size.proxies} cores \|", table)


def test_estimate_grows_with_each_load() -> None:
    load = Load(keys=1e6, updates=1e5, reads=1e5)
    for name, factors in (("keys", (1, 10, 1000)), ("updates", (1, 10, 50)), ("reads", (1, 10, 1000))):
        sizes = [estimate(replace(load, **{name: getattr(load, name) * factor})) for factor in factors]
        for what in ("servers", "proxies", "store_bytes_all", "log_bytes_max", "log_bytes_per_s"):
            amounts = [getattr(size, what) for size in sizes]
            assert amounts == sorted(amounts), (name, what)


def test_appliers_and_clients_stay_within_part_of_core_that_may_be_busy() -> None:
    for load in (
        AT_SCALE,
        replace(AT_SCALE, in_python=True),
        Load(keys=1e6, updates=2e6, reads=3e6, jobs=3, pipeline=16),
    ):
        chosen = replace(load, share_used=0.5)
        size = estimate(chosen)
        assert size.serving_cores <= 0.5 + 1e-6 and size.applying_cores <= 0.5 * chosen.jobs + 1e-6


def test_each_replica_is_copy_of_all_that_server_has() -> None:
    alone, copied = estimate(AT_SCALE), estimate(replace(AT_SCALE, replicas=2))
    assert copied.servers == 3 * alone.servers and copied.store_bytes_all == 3 * alone.store_bytes_all
    assert copied.log_read_bytes_per_s_all == 3 * alone.log_read_bytes_per_s_all
    assert copied.log_bytes_max == alone.log_bytes_max


def test_updates_that_no_number_of_servers_takes_need_several_jobs() -> None:
    load = Load(keys=1e6, updates=100e6, reads=0)
    with pytest.raises(SizeError, match=r"too many for one job.*--jobs"):
        estimate(load)
    assert estimate(replace(load, jobs=10)).servers > 1


def test_no_load_needs_one_server() -> None:
    size = estimate(Load(keys=0, updates=0, reads=0))
    assert (size.servers, size.proxies, size.store_bytes_all, size.log_bytes_max) == (1, 0, 0, 0)


def test_retained_size_of_log_is_as_documented() -> None:
    # Epochs of a second: an interval of at most 1,000 s, so an hour and a half and one interval.
    load = Load(keys=1e6, updates=1e4, reads=0)
    size, snapshot = estimate(load), 1e6 * 72
    assert size.log_bytes_max == pytest.approx(5 * snapshot + 1e4 * 72 * (5400 + 200))
    # Two intervals where they are longer than the retention.
    rare = replace(load, updates=1, epoch_s=60)
    assert estimate(rare).log_bytes_max == pytest.approx(2 * snapshot + 72 * 2 * 60_000)


def test_requests_and_replies_have_bytes_of_protocol() -> None:
    assert request_bytes(3) == len(b"*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n")
    assert reply_bytes(4) == len(b"$4\r\n12.5\r\n")


def test_bottlenecks_are_named() -> None:
    assert estimate(Load(keys=1e6, updates=1e3, reads=0)).warnings == ()
    many = estimate(Load(keys=1e8, updates=71e6 / 60, reads=10e6))
    assert len(many.warnings) == 2 and "files of the log" in many.warnings[0] and "GB of the log" in many.warnings[1]


def test_command_prints_estimate_its_assumptions_and_its_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--pipeline", "100", "--busy", "100"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^servers +3 +3 with a part of the keys each$", printed, re.MULTILINE)
    assert re.search(r"^proxies +2 ", printed, re.MULTILINE)
    assert "assumptions:" in printed and "docs/scale.md" in printed


def test_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["load"]["updates"] == pytest.approx(71e6 / 60)
    assert printed["size"]["servers"] == estimate(Load(keys=1e8, updates=71e6 / 60, reads=1e7, share_used=0.67)).servers
    assert {cost["page"] for cost in printed["costs"]} <= {"docs/scale.md", "docs/performance.md", "docs/change-log.md"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--keys", "many"], "'many' is not a number such as 500, 10k, 71M, 1e7"),
        (["--keys", "1/s"], "'1/s' is not a number such as 500, 10k, 71M, 1e7"),
        (["--updates", "5/day"], "'5/day' is not a number such as 500, 10k, 71M, 1e7 or 71M/min"),
        (["--epoch", "0"], "'0' is not a number of seconds up to 86400"),
    ],
)
def test_wrong_number_is_refused_with_example(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*COMMAND, *words])
    assert capsys.readouterr().err.endswith(f"{said}; see sparkis size --help\n")


@pytest.mark.parametrize(
    ("text", "as_digits"), [("1e7", "10M"), ("1E+7", "10000000"), ("2.5e3", "2.5k"), ("1e3k", "1M")]
)
def test_number_may_be_written_with_exponent(text: str, as_digits: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for each in (text, as_digits):
        assert main([*COMMAND, "--keys", each, "--reads", f"{each}/min"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
