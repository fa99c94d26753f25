"""Servers of a log: beside the driver with `sparkis.serve`, and without Spark with `sparkis serve`."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import redis
from pyspark.sql import SparkSession

import sparkis as public
from compat.conformance.servers import free_port
from compat.waiting import WAIT_S_MAX, eventually
from resp_server.native import CORE
from resp_server.programs import stop
from resp_server.serving.server_file import folder_of
from spark_hooks.serving import endpoints
from spark_hooks.serving.executor_endpoint import ExecutorsEndpoint
from tests.spark import placing
from tests.spark.micro_batches import Batches, start
from tests.spark.processes import served, sparkis, status

pytestmark = pytest.mark.usefixtures("no_log_left_over")

Make = Callable[[str], Batches]
RATES = ("EPOCHS/MIN", "CHANGES/MIN")


def begin(rows: Batches, name: str, checkpoint: Path, **options: Any) -> Any:
    writer = public.queryable(rows.df, "s", key="k", value="v", mode="append", **options)
    return start(writer, name, checkpoint)


def content(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return what would change if anybody wrote there."""
    return {
        str(path.relative_to(folder)): (path.stat().st_ino, path.stat().st_mtime_ns, path.stat().st_size)
        for path in folder.rglob("*")
    } | {".": (folder.stat().st_ino, folder.stat().st_mtime_ns, 0)}


# Without Spark --------------------------------------------------------------------------------------------------------


def unless_loading(client: redis.Redis, key: str) -> str | None:
    """Return what stands at a key; nothing while a job that was just found is being opened, which is an error."""
    try:
        return client.get(key)
    except redis.exceptions.BusyLoadingError:
        return None


@pytest.mark.versions
def test_log_is_served_while_its_job_runs_and_after(batches: Make, tmp_path: Path):
    rows = batches("k string, v int")
    rows.add({"k": "a", "v": 1})
    log = tmp_path / "log"
    query = begin(rows, "job", tmp_path / "checkpoint", log=log)
    with (
        served("--log", log, "--store", tmp_path / "store") as url,
        redis.Redis.from_url(url, decode_responses=True) as client,
    ):
        assert client.get("job:s:a") == "1"  # what is there is readable when the server says that it has started
        rows.add({"k": "a", "v": 2})
        query.processAllAvailable()
        eventually(lambda: client.get("job:s:a"), lambda value: value == "2")
        eventually(lambda: status("--url", url), lambda shown: "live" in shown.stdout)
        begin(rows, "later", tmp_path / "later", log=log)
        eventually(lambda: unless_loading(client, "later:s:a"), lambda value: value == "2")
        query.stop()
        eventually(lambda: json.loads(status("--url", url, "--json").stdout)[0]["stale"], lambda stale: stale == 1)
        assert client.get("job:s:a") == "2"


def test_serving_changes_nothing_in_log(batches: Make, tmp_path: Path):
    rows = batches("k string, v string")
    rows.add({"k": "a", "v": "1"})
    rows.add({"k": "b", "v": "x" * 100_000})
    log = tmp_path / "log"
    query = begin(rows, "job", tmp_path / "checkpoint", log=log)
    query.stop()
    alive = log / "job" / "heartbeats" / "1.json"
    eventually(lambda: json.loads(alive.read_text())["is_running"], lambda running: not running)
    for path in log.rglob("*"):
        path.chmod(stat.S_IREAD | (stat.S_IEXEC if path.is_dir() else 0))
    before = content(log)
    for _ in range(2):  # the second time from its store
        with (
            served("--log", log, "--store", tmp_path / "store", "--compact", "no") as url,
            redis.Redis.from_url(url, decode_responses=True) as client,
        ):
            assert client.mget("job:s:a", "job:s:b") == ["1", "x" * 100_000]
            assert client.execute_command("STATE", "LAG")[0]["stale"] == 1
    assert content(log) == before


def test_missing_log_is_refused(tmp_path: Path):
    with sparkis("serve", "--log", tmp_path / "nowhere", "--port", 0) as server:
        server.wait_for(r"sparkis serve: --log .*nowhere is not a folder")
        assert server.process.wait(10) == 1


def test_folder_without_job_is_named_and_readonly_log_is_not_compacted(tmp_path: Path):
    with sparkis("serve", "--log", "/proc/self", "--store", tmp_path / "store", "--port", 0) as server:
        server.wait_for("the log /proc/self is not compacted, because it cannot be written: ")
        server.wait_for("no jobs found in /proc/self; is it the log's root")
    with sparkis("serve", "--log", "/proc/self", "--store", tmp_path / "store", "--port", 0, "--compact") as server:
        server.wait_for(r"sparkis serve: .*/proc/self")
        assert server.process.wait(10) == 1


def test_status_shows_line_per_job_and_json(batches: Make, tmp_path: Path):
    rows = batches("k string, v int")
    rows.add({"k": "a", "v": 1}, {"k": "b", "v": 2})
    states = [public.StateDescriptor("s", key="k", value="v"), public.StateDescriptor("m", key="k", value=["k", "v"])]
    log = tmp_path / "log"
    start(public.queryable(rows.df, *states, mode="append", log=log), "job", tmp_path / "checkpoint")
    with served("--log", log, "--store", tmp_path / "store") as url:
        table = eventually(lambda: status("--url", url), lambda shown: "live" in shown.stdout)
        assert table.returncode == 0
        heading, line, gap, version = table.stdout.splitlines()
        assert heading.split() == ["JOB", "STATES", "KEYS", "EPOCH", "LAG", "AGE", *RATES, "CONDITION"]
        cells = re.split(" {2,}", re.sub(r"\d+\.\d s", "AGE", line))
        assert cells == ["job", "2", "4", "0", "0 epochs, 0 ms", "AGE", "1", "4", "live"]
        assert (gap, version) == ("", f"sparkis {public.__version__}, {CORE} core")
        states = status("--url", url, "-v").stdout.split("\n\n")[1]
        assert [each.split() for each in states.splitlines()] == [
            ["JOB", "STATE", "KIND", "KEYS", "BYTES"],
            ["job", "s", "value", "2", "-"],
            ["job", "m", "map", "2", "-"],
        ]
        with sparkis("status", "--url", url, "--watch", 1) as watching:
            watching.wait_for(r"(?s)JOB .*JOB ")
            assert watching.end(signal.SIGINT) == 0
        (job,) = eventually(
            lambda: json.loads(status("--url", url, "--json").stdout), lambda jobs: not jobs[0]["stale"]
        )
        assert (job["name"], job["applied"], job["committed"], job["stale"], job["error"]) == ("job", 0, 0, 0, "")
        assert [(each["name"], each["kind"], each["keys"]) for each in job["states"]] == [
            ("s", "value", 2),
            ("m", "map", 2),
        ]


def test_status_names_problem(tmp_path: Path):
    (tmp_path / "log").mkdir()
    with served("--log", tmp_path / "log", "--store", tmp_path / "store", "--requirepass", "secret") as url:
        refused = status("--url", url)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert refused.stderr.startswith("sparkis status: ")
        assert "wants a password: give it in the URL, or in SPARKIS_PASSWORD" in refused.stderr
        assert "WRONGPASS" in status("--url", url.replace("//", "//:wrong@")).stderr
        empty = status("--url", url.replace("//", "//:secret@"))
        assert (empty.returncode, empty.stdout) == (0, "")
        assert empty.stderr.startswith("no jobs at ")
    gone = status("--url", url)
    assert gone.returncode == 1
    assert gone.stderr.startswith("sparkis status: cannot connect to 127.0.0.1:")
    assert "is not a URL" in status("--url", "localhost").stderr


# Beside the driver ----------------------------------------------------------------------------------------------------


def test_stop_ends_server_and_may_be_called_twice(spark: SparkSession, tmp_path: Path):
    endpoint = public.serve(spark, log=tmp_path / "log")
    assert spark.conf.get("spark.sparkis.log") == str(tmp_path / "log")
    assert redis.Redis.from_url(endpoint.url).ping()
    assert f"at port {endpoint.port}; it stays 600 s after a crash of the driver" in str(endpoint)
    store = endpoint._server.folder / "store"
    assert store.is_dir()
    endpoint.stop()
    endpoint.stop()
    assert not store.exists()
    assert not endpoints.of_log(str(tmp_path / "log"))
    with pytest.raises(redis.ConnectionError):
        redis.Redis.from_url(endpoint.url).ping()


def test_serving_log_again_returns_or_replaces_server(spark: SparkSession, batches: Make, tmp_path: Path):
    rows = batches("k string, v int")
    rows.add({"k": "a", "v": 1})
    first, second = (public.serve(spark, log=log) for log in (tmp_path / "log", f"file://{tmp_path}/log"))
    assert second is first
    with public.serve(spark, log=tmp_path / "log", password="secret") as other:
        assert other.port == first.port
        begin(rows, "job", tmp_path / "checkpoint", wait_for_visibility=True)
        with redis.Redis.from_url(other.url) as client:
            assert client.get("job:s:a") == b"1"
    with pytest.raises(redis.ConnectionError):
        redis.Redis.from_url(first.url).ping()


def test_after_sparkis_stop_serving_again_starts_another_server(spark: SparkSession, tmp_path: Path):
    first = public.serve(spark, log=tmp_path / "log")
    assert stop.run(Namespace(log=str(tmp_path / "log"))) == 0
    eventually(lambda: not (folder_of(str(tmp_path / "log")) / "server.json").exists())
    with public.serve(spark, log=tmp_path / "log") as second:
        assert second is not first
        assert second.port == first.port
        assert redis.Redis.from_url(second.url).ping()


@pytest.mark.versions
def test_killed_server_returns_on_its_port_with_all_epochs(spark: SparkSession, batches: Make, tmp_path: Path):
    rows = batches("k string, v int")
    rows.add({"k": "a", "v": 1})
    endpoint = public.serve(spark, log=tmp_path / "log", password="secret")
    try:
        query = begin(rows, "job", tmp_path / "checkpoint", wait_for_visibility=True)
        killed = endpoint.pid
        os.kill(killed, signal.SIGKILL)
        rows.add({"k": "a", "v": 2})
        query.processAllAvailable()
        client = redis.Redis.from_url(endpoint.url)
        assert client.get("job:s:a") == b"2"  # the batch waited until the server was back
        assert endpoint.pid != killed
        rows.add({"k": "a", "v": 3})
        query.processAllAvailable()
        assert client.get("job:s:a") == b"3"
    finally:
        endpoint.stop()


def test_store_of_its_own_is_kept(spark: SparkSession, batches: Make, tmp_path: Path):
    rows = batches("k string, v int")
    rows.add({"k": "a", "v": 1})
    for _ in range(2):
        endpoint = public.serve(
            spark, log=tmp_path / "log", placement=public.Driver(store=tmp_path / "store"), bind="127.0.0.1"
        )
        begin(rows, "job", tmp_path / "checkpoint", wait_for_visibility=True).stop()
        with redis.Redis.from_url(endpoint.url) as client:
            assert client.get("job:s:a") == b"1"
        endpoint.stop()
        assert (tmp_path / "store" / "job").is_dir()


def test_batch_that_was_waited_for_can_be_read_from_every_worker(spark: SparkSession, batches: Make, tmp_path: Path):
    rows = batches("k string, v int")
    rows.add({"k": "a", "v": 0})
    metrics = free_port()
    endpoint = public.serve(spark, log=tmp_path / "log", workers=2, metrics=metrics)
    try:
        query = begin(rows, "job", tmp_path / "checkpoint", wait_for_visibility=True)
        for value in range(1, 4):
            rows.add({"k": "a", "v": value})
            query.processAllAvailable()
            for _ in range(4):  # new connections go to the workers in turn
                with redis.Redis.from_url(endpoint.url) as client:
                    assert client.get("job:s:a") == b"%d" % value
        with urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=WAIT_S_MAX) as reply:
            counted = reply.read().decode()
        assert 'sparkis_command_duration_seconds_count{group="string"} 12.0' in counted
        assert 'sparkis_job_stale{job_name="job"} 0.0' in counted
    finally:
        endpoint.stop()


@pytest.mark.versions
def test_state_server_started_by_hand_joins_and_outlives_driver(
    spark: SparkSession, batches: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SPARKIS_CONTROL_TOKEN", "a token")
    rows = batches("k string, v int")
    rows.add(*({"k": f"k{i}", "v": i} for i in range(100)))
    endpoint = public.serve(spark, log=tmp_path / "log", placement="executors")
    assert isinstance(endpoint, ExecutorsEndpoint)
    begin(rows, "job", tmp_path / "checkpoint", wait_for_visibility=WAIT_S_MAX)
    own = placing.server_pids(endpoint)
    options = ("--log", tmp_path / "log", "--store", tmp_path / "store", "--bind", "127.0.0.1", "--port", 0)
    with sparkis("state-server", "--registry", endpoint.registry, *options) as server:
        eventually(
            lambda: [member["slots"] for member in endpoint.members()], lambda found: len(found) == 2 and all(found)
        )
        eventually(
            lambda: placing.values_or_error(endpoint.url),
            lambda answers: answers == {f"job:s:k{i}": str(i) for i in range(100)},
        )
        endpoint.stop()
        eventually(lambda: [pid for pid in own if placing.is_running(pid)], lambda left: left == [])
        assert server.process.poll() is None


def test_serving_again_returns_or_replaces_servers_of_executors(spark: SparkSession, tmp_path: Path):
    first = public.serve(spark, log=tmp_path / "log", placement="executors")
    assert isinstance(first, ExecutorsEndpoint)
    eventually(first.members, bool)
    processes = placing.all_processes(first)
    assert public.serve(spark, log=f"file://{tmp_path}/log", placement="executors") is first
    metrics = f"127.0.0.1:{free_port()}"
    with public.serve(
        spark, log=tmp_path / "log", placement=public.Executors(ports="7400-7499"), metrics=metrics
    ) as second:
        assert endpoints.of_log(str(tmp_path / "log")) == [second]
        eventually(lambda: [pid for pid in processes if placing.is_running(pid)], lambda left: left == [])
        assert isinstance(second, ExecutorsEndpoint)
        eventually(second.members, bool)
        with urlopen(f"http://{metrics}/metrics", timeout=WAIT_S_MAX) as reply:
            assert "\nsparkis_proxy_slots_unserved " in reply.read().decode()


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (
            {"metrics": "nowhere"},
            "metrics='nowhere': 'nowhere' is not [HOST:]PORT, such as 9379, 10.0.0.1:9379 or [::1]:9379",
        ),
        ({"port": 99_999}, "port=99999: give a number from 0 to 65535"),
        ({"placement": public.Driver(linger=-1)}, "linger=-1: give a number of seconds, 0 or more, or None for ever"),
        ({"limits": public.Limits(maxclients=0)}, "Limits.maxclients: '0' is not a number of connections from 1 to"),
        ({"limits": public.Limits(slowlog_max_len=-2)}, "Limits.slowlog_max_len: '-2': argument must be between 0 and"),
        ({"placement": "nowhere"}, "placement='nowhere': give one of 'driver', 'executors'"),
        ({"replicas": 1}, "replicas=1 has no effect with placement='driver'; leave it out"),
        ({"placement": "executors", "workers": 2}, "workers=2 has no effect with placement='executors'"),
        ({"placement": public.Executors(ports="7500-7400")}, "ports='7500-7400': give the first and the last port"),
        ({"placement": public.Executors(ports="7400")}, "ports='7400': give the first and the last port"),
        ({"placement": public.Executors(ports="7400-70000")}, "ports='7400-70000': give the first and the last port"),
        ({"placement": "executors", "replicas": -1}, "replicas=-1: give a number from 0 to 10"),
        ({"placement": public.Executors(registry_port=65_536)}, "registry_port=65536: give a number from 0 to 65535"),
    ],
)
def test_impossible_argument_is_refused(spark: SparkSession, tmp_path: Path, given: dict[str, Any], error: str):
    with pytest.raises(ValueError, match=re.escape(error)):
        public.serve(spark, log=tmp_path / "log", **given)


def test_call_without_session_is_refused(tmp_path: Path):
    with pytest.raises(TypeError, match=r"takes the SparkSession first, sparkis.serve\(spark, log=...\), not '/log'"):
        public.serve("/log")  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, -1, 65])
def test_impossible_number_of_workers_is_refused(spark: SparkSession, tmp_path: Path, workers: int):
    with pytest.raises(ValueError, match=f"workers={workers}: give a number of processes from 1 to 64"):
        public.serve(spark, log=tmp_path / "log", workers=workers)
