"""Metrics and health of real processes: a server with workers, a proxy with an upstream, a registry with a server."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from compat.conformance.servers import CONTROL_TOKEN, Running, child_environment, free_port, sparkis_program
from compat.waiting import WAIT_S_MAX, eventually
from resp_server.exporter.declarations import METRICS, PROXY, REGISTRY, SERVE, STATE_SERVER, UPSTREAM, Kind
from resp_server.exporter.listener import CONNECTIONS_MAX, REQUEST_BYTES_MAX, MetricsListener
from resp_server.exporter.sources import ServerSource
from state_backend.apply.compact import compact_log
from state_backend.codec import packed_map
from state_backend.log.epochs import EpochContent
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from tests.server.conftest import NOW_MS
from tests.server.overlay import Overlay

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
DEPLOY = Path(__file__).parents[2] / "deploy"
PROGRESS = StateDescriptor("_progress", key_format="job:_progress", field="fact", value="value")
STATES = [StateDescriptor("speed", key="car", value="kmh"), PROGRESS]
FACTS = {
    "batch": 7, "batch_duration_ms": 250, "input_rows": 10, "input_rows_per_second": 40.5,
    "processed_rows_per_second": 41, "state_rows": 5, "state_memory_bytes": 1000,
}  # fmt: skip
SHADOW_RULES = """
[[rule]]
name = "board"
keys = "board/<account>"
owner = "shadow"
state_key = "dash/<account>/apdex"
"""


@dataclass
class Scraped:
    """A program with `--metrics`."""

    port: int
    program: str

    def get(self, path: str, accept: str = "*/*", method: str = "GET") -> tuple[int, str, str]:
        """Return the status, the media type and the body of a reply."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, headers={"Accept": accept})
        response = connection.getresponse()
        return response.status, response.headers["Content-Type"], response.read().decode()

    def samples(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """Return the values, by name and label values. The parser refuses what is not OpenMetrics."""
        status, content_type, text = self.get("/metrics", OPEN_METRICS)
        assert status == 200 and content_type.startswith("application/openmetrics-text")
        return {
            (sample.name, tuple(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def names(self) -> set[str]:
        """Return the names of all values, without the suffixes of histograms."""
        return {re.sub(r"_(bucket|sum|count)$", "", name) for name, _ in self.samples()}

    def wait_until_ready(self) -> None:
        """Wait for `/readyz`; the listener may not be there yet."""

        def status() -> int:
            try:
                return self.get("/readyz")[0]
            except OSError:
                return 0

        eventually(status, lambda found: found == 200)


def write_log(log: Path) -> LogWriter:
    """Write twenty keys, a query's progress, and the offsets of its source."""
    log.mkdir()
    facts = packed_map.pack([(name.encode(), str(value).encode()) for name, value in FACTS.items()])
    writer = LogWriter(log, "job", STATES, "first")
    writer.publish(
        [
            *(Change("speed", Op.PUT, b"job:speed:%d" % number, value=b"7") for number in range(20)),
            Change("_progress", Op.PUT, b"job:_progress", value=facts),
        ]
    )
    commit_offsets(writer, 1)
    writer.send_heartbeat(sources={"at_ms": NOW_MS, "newest": {"0": {"cars": {"0": 12}}}})
    return writer


def commit_offsets(writer: LogWriter, epoch: int) -> None:
    """Commit an epoch that only has offsets of its source and ages of records: `publish` has none."""
    offsets = ('{"cars":{"0":10}}',)
    writer.commit(epoch, EpochContent(record_ages={0: 30, 40: 10}), clock_ms=writer.clock_ms(), offsets=offsets)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Scraped, LogWriter]]:
    """A server with two workers."""
    folder = tmp_path_factory.mktemp("metrics")
    writer, scraped = write_log(folder / "log"), Scraped(free_port(), SERVE)
    compact_log(str(folder / "log"), "job", retention_ms=0)
    options = ("--port", "0", "--log", str(folder / "log"), "--store", str(folder / "store"), "--workers", "2")
    with sparkis_program(
        ("-m", "resp_server.programs.serve"), *options, "--metrics", str(scraped.port), "--ready-lag-max", "60"
    ) as running:
        scraped.wait_until_ready()
        yield running, scraped, writer


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Overlay, Scraped]]:
    """A proxy with an upstream and a shadow rule, in front of two servers."""
    folder, scraped = tmp_path_factory.mktemp("overlay"), Scraped(free_port(), PROXY)
    (folder / "rules.toml").write_text(SHADOW_RULES)
    with ExitStack() as stack:
        options = ("--metrics", str(scraped.port), "--routes", str(folder / "rules.toml"))
        yield Overlay(folder, stack, *options), scraped


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scraped, Scraped]]:
    """A registry, and its only state server."""
    folder = tmp_path_factory.mktemp("cluster")
    write_log(folder / "log").close()
    compact_log(str(folder / "log"), "job", retention_ms=0)
    registry, state_server = Scraped(free_port(), REGISTRY), Scraped(free_port(), STATE_SERVER)
    log = ("--log", str(folder / "log"), "--port", "0")
    with (
        sparkis_program(("-m", "resp_server.programs.registry"), *log, "--metrics", str(registry.port)),
        sparkis_program(
            ("-m", "resp_server.programs.state_server"),
            *(*log, "--bind", "127.0.0.1", "--store", str(folder / "store"), "--metrics", str(state_server.port)),
        ),
    ):
        state_server.wait_until_ready()
        registry.wait_until_ready()
        yield registry, state_server


def declared(*programs: str) -> set[str]:
    return {name for name, metric in METRICS.items() if set(metric.of) & set(programs)}


def test_server_with_workers_adds_up_their_counts(server: tuple[Running, Scraped, LogWriter]) -> None:
    running, scraped, _ = server
    before = scraped.samples()
    with ExitStack() as stack:
        for connection in [stack.enter_context(running.connect()) for _ in range(4)]:  # two at each worker
            assert connection.call("GET", "job:speed:3").plain == b"7"
            assert connection.call("GET", "job:speed:absent").plain is None
            assert connection.call("HGETALL", "job:speed:3").is_error
        found = scraped.samples()

    def grown(name: str, *labels: str) -> float:
        return found[name, labels] - before.get((name, labels), 0)

    assert grown("sparkis_keyspace_hits_total") >= 4 and grown("sparkis_keyspace_misses_total") == 4
    assert grown("sparkis_command_duration_seconds_count", "string") == 8
    assert grown("sparkis_command_duration_seconds_bucket", "string", "+Inf") == 8
    assert grown("sparkis_commands_failed_total", "hash") == 4 and grown("sparkis_errors_total", "WRONGTYPE") == 4
    assert grown("sparkis_connections_received_total") == 4 and found["sparkis_connected_clients", ()] == 4
    assert grown("sparkis_received_bytes_total") > 4 * 60 and grown("sparkis_sent_bytes_total") > 4 * 12


def test_metrics_cover_jobs_states_and_queries(server: tuple[Running, Scraped, LogWriter]) -> None:
    _, scraped, writer = server
    found = scraped.samples()
    assert found["sparkis_jobs", ()] == 1 and found["sparkis_slots", ()] == 16384
    assert found["sparkis_state_keys", ("job", "speed")] == 20 and found["sparkis_job_keys", ("job",)] == 21
    speeds = sum(len(b"job:speed:%d7" % number) for number in range(20))
    assert found["sparkis_state_bytes", ("job", "speed")] == speeds, "the log has a snapshot"
    assert found["sparkis_query_batch_duration_seconds", ("job",)] == 0.25
    assert found["sparkis_query_input_rows_per_second", ("job",)] == 40.5
    assert found["sparkis_source_lag_records", ("job", "0", "cars")] == 2
    applied = found["sparkis_job_applied_epochs_total", ("job",)]
    epoch = writer.publish([Change("speed", Op.PUT, b"job:speed:new", value=b"8")])
    eventually(lambda: scraped.samples()["sparkis_job_epoch", ("job",)], lambda seen: seen == epoch)
    found = scraped.samples()
    assert found["sparkis_job_committed_epoch", ("job",)] == epoch and found["sparkis_job_lag_seconds", ("job",)] == 0
    eventually(lambda: scraped.samples()["sparkis_job_applied_epochs_total", ("job",)], lambda seen: seen > applied)
    assert found["sparkis_job_apply_seconds_total", ("job",)] > 0
    commit_offsets(writer, epoch + 1)
    eventually(lambda: scraped.samples()["sparkis_job_epoch", ("job",)], lambda seen: seen == epoch + 1)
    counted = eventually(
        lambda: scraped.samples().get(("sparkis_record_delay_seconds_count", ("job",)), 0), lambda seen: seen > 0
    )
    found = scraped.samples()
    name = "sparkis_record_delay_seconds"
    assert counted == found[f"{name}_bucket", ("job", "+Inf")] == 40
    assert found[f"{name}_bucket", ("job", "1.0")] <= 30, "the age of 1.02 s is part of the delay"
    assert found[f"{name}_sum", ("job",)] >= 10 * 1.02


def test_each_program_has_exactly_metrics_of_page(
    server: tuple[Running, Scraped, LogWriter], proxy: tuple[Overlay, Scraped], cluster: tuple[Scraped, Scraped]
) -> None:
    overlay, behind = proxy
    with overlay.proxy.connect() as client:
        client.call("NOSUCHCOMMAND")
        client.call("GET", "job:speed:1")
        client.call("HGETALL", "job:speed:1")
    with server[0].connect() as client:
        client.call("NOSUCHCOMMAND")
        client.call("GET", "job:speed:1")
    registry, state_server = cluster
    _, scraped, writer = server
    commit_offsets(writer, writer.publish([Change("speed", Op.PUT, b"job:speed:new", value=b"9")]) + 1)
    eventually(lambda: ("sparkis_record_delay_seconds_count", ("job",)) in scraped.samples())
    counted = {"sparkis_errors_total", "sparkis_command_duration_seconds", "sparkis_commands_failed_total"}
    counted |= {"sparkis_commands_rejected_total"}
    # No query sends values before their commit.
    unknown = {"sparkis_job_fresh_age_seconds"}
    assert scraped.names() | unknown == declared(SERVE)
    # The log of the proxy's servers has no snapshot, and no source.
    unknown |= {"sparkis_state_bytes", "sparkis_source_lag_records", "sparkis_source_lag_age_seconds"}
    assert behind.names() | unknown == declared(PROXY, UPSTREAM)
    assert registry.names() == declared(REGISTRY)
    # No client has asked the state server anything, and its job's epochs are older than it.
    counted |= {"sparkis_record_delay_seconds", "sparkis_job_fresh_age_seconds"}
    assert state_server.names() | counted == declared(STATE_SERVER)


def test_metrics_of_proxy_name_its_servers(proxy: tuple[Overlay, Scraped]) -> None:
    overlay, scraped = proxy
    scraped.wait_until_ready()
    servers = [f"127.0.0.1:{port}" for port in overlay.ports]

    def is_up() -> bool:
        found = scraped.samples()
        return all(found["sparkis_proxy_server_up", (address,)] == 1 for address in servers)

    eventually(is_up)
    found = scraped.samples()
    assert [found["sparkis_proxy_server_slots", (address,)] for address in servers] == [8192, 8192]
    assert found["sparkis_upstream_up", ()] == 1 and found["sparkis_proxy_slots_unserved", ()] == 0
    assert found["sparkis_job_keys", ("job",)] == 9
    keys = {labels: count for (name, labels), count in found.items() if name == "sparkis_state_keys"}
    assert sum(keys.values()) == 9 and keys["job", "speed"] > 0, keys
    assert found["sparkis_shadow_compared_total", ("board",)] == 0


def test_proxy_without_upstream_reports_it_and_serves_states(proxy: tuple[Overlay, Scraped]) -> None:
    overlay, scraped = proxy
    overlay.signal_upstream(signal.SIGKILL)

    def is_up() -> float:
        with overlay.proxy.connect() as client:
            client.call("GET", "nobody's")
        return scraped.samples()["sparkis_upstream_up", ()]

    eventually(is_up, lambda found: found == 0)
    assert scraped.get("/readyz")[0] == 200
    overlay.start_upstream()
    overlay.wait_until_ready(overlay.proxy)


def test_registry_knows_its_servers_and_their_slots(cluster: tuple[Scraped, Scraped]) -> None:
    registry, state_server = cluster
    eventually(lambda: registry.samples()["sparkis_registry_servers", ("connected",)], lambda found: found == 1)
    found = registry.samples()
    assert found["sparkis_registry_leader", ()] == 1 and found["sparkis_registry_term", ()] == 1
    assert found["sparkis_registry_slots_unowned", ()] == 0
    assert [value for (name, _), value in found.items() if name == "sparkis_registry_server_slots"] == [16384]
    eventually(lambda: state_server.samples()["sparkis_slots_loading", ()], lambda slots: slots == 0)
    assert state_server.samples()["sparkis_slots", ()] == 16384


def test_listener_answers_only_its_own_paths(server: tuple[Running, Scraped, LogWriter]) -> None:
    _, scraped, _ = server
    assert scraped.get("/livez") == (200, "text/plain; charset=utf-8", "ok\n")
    assert scraped.get("/readyz?verbose")[::2] == (200, "ok\n")
    assert scraped.get("/")[::2] == (404, "there are /metrics, /livez and /readyz\n")
    assert scraped.get("/metrics", method="POST")[0] == 405
    status, content_type, body = scraped.get("/metrics", method="HEAD")
    assert status == 200 and content_type.startswith("text/plain") and body == ""


@pytest.fixture
def listening(serve: Callable[..., Any]) -> Iterator[tuple[Any, MetricsListener, Scraped]]:
    """A server in this process, and its listener, for what a test cannot make another process do."""
    served = serve()
    listener = MetricsListener(ServerSource(served.server), ("127.0.0.1", 0), 5.0)
    served.run(listener.start())
    yield served, listener, Scraped(listener.port, SERVE)
    served.run(listener.stop())


def test_server_is_not_ready_while_it_loads(listening: tuple[Any, MetricsListener, Scraped]) -> None:
    served, _, scraped = listening
    assert scraped.get("/readyz")[::2] == (200, "ok\n")
    served.call(lambda: served.server.set_loading(True))
    assert scraped.get("/readyz")[::2] == (503, "loading\n") and scraped.get("/livez")[0] == 200
    assert scraped.samples()["sparkis_ready", ()] == 0


def test_server_is_not_ready_while_job_lags_more_than_it_may(
    listening: tuple[Any, MetricsListener, Scraped],
) -> None:
    served, _, scraped = listening
    jobs = served.server.context.keyspace.jobs

    def fall_behind(lag_ms: int) -> None:
        job = jobs["job"]
        jobs["job"] = replace(job, committed_epoch=5, committed_clock_ms=NOW_MS + lag_ms)

    served.call(lambda: fall_behind(5000))
    assert scraped.get("/readyz")[0] == 200
    served.call(lambda: fall_behind(5001))
    assert scraped.get("/readyz")[::2] == (503, "job job: 5.001 s behind\n")
    assert scraped.samples()["sparkis_job_lag_seconds", ("job",)] == 5.001
    assert scraped.samples()["sparkis_job_lag_epochs", ("job",)] == 1


def test_server_that_drains_is_alive_and_not_ready(listening: tuple[Any, MetricsListener, Scraped]) -> None:
    served, listener, scraped = listening
    served.call(listener.drain)
    assert scraped.get("/readyz")[::2] == (503, "draining\n") and scraped.get("/livez")[0] == 200
    assert scraped.samples()["sparkis_ready", ()] == 0


def test_listener_bounds_its_connections_and_bytes_of_request(
    listening: tuple[Any, MetricsListener, Scraped],
) -> None:
    _, listener, scraped = listening
    with socket.create_connection(("127.0.0.1", listener.port), WAIT_S_MAX) as talker:
        talker.sendall(b"GET /metrics HTTP/1.1\r\n" + b"X-Header: 1\r\n" * REQUEST_BYTES_MAX)
        with suppress(ConnectionError):
            assert talker.recv(1) == b""
    silent = [socket.create_connection(("127.0.0.1", listener.port), WAIT_S_MAX) for _ in range(CONNECTIONS_MAX + 1)]
    assert silent[-1].recv(1) == b""
    for each in silent:
        each.close()
    eventually(lambda: scraped.get("/livez")[0] if len(listener._connections) < CONNECTIONS_MAX else 0)


def test_metrics_option_names_missing_extra(tmp_path: Path) -> None:
    code = "import sys; from importlib import util; found = util.find_spec\n"
    code += "util.find_spec = lambda name, *rest: None if name == 'prometheus_client' else found(name, *rest)\n"
    code += "from sparkis.__main__ import main; sys.exit(main())"
    (tmp_path / "log").mkdir()
    environment = child_environment() | {"SPARKIS_CONTROL_TOKEN": CONTROL_TOKEN}
    for program in ("serve", "registry", "state-server", "proxy"):
        command = [sys.executable, "-c", code, program, "--log", str(tmp_path / "log"), "--metrics", "9"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert (done.returncode, done.stderr) == (
            1,
            f"sparkis {program}: --metrics needs prometheus_client: pip install 'sparkis[metrics]'\n",
        )


def test_lag_limit_without_metrics_is_mistake(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "sparkis", "serve", "--log", str(tmp_path / "log"), "--ready-lag-max", "5"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "--ready-lag-max is for /readyz" in done.stderr


def test_alerts_and_dashboard_use_existing_metrics(
    server: tuple[Running, Scraped, LogWriter], proxy: tuple[Overlay, Scraped], cluster: tuple[Scraped, Scraped]
) -> None:
    scraped = {name for each in (server[1], proxy[1], *cluster) for name in each.names()}
    dashboard = json.loads((DEPLOY / "grafana" / "sparkis.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    expressions += [each["query"]["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    named = metrics_in((DEPLOY / "prometheus" / "alerts.yml").read_text()) | metrics_in("\n".join(expressions))
    assert named and named <= scraped
    assert all(metrics_in(expression) or "up{" in expression for expression in expressions)


def metrics_in(text: str) -> set[str]:
    found = re.findall(r"\bsparkis_[a-z_]+", text)
    suffixes = "|".join(name for name, metric in METRICS.items() if metric.kind is Kind.HISTOGRAM)
    return {re.sub(rf"^({suffixes})_(bucket|sum|count)$", r"\1", name) for name in found}
