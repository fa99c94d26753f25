"""A real Prometheus scrapes real servers, and its promtool checks the alerts. `make test-slow` installs it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from compat.conformance.servers import Running, free_port, sparkis_server
from compat.waiting import eventually
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="there is no prometheus on the PATH"),
]

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
STATES = [StateDescriptor("speed", key="car", value="kmh")]
# A job that nobody writes is stale at once, and what has to last minutes lasts seconds here.
ALERT_DURATION = re.compile(r"for: \d+m")

# What an alert is for, and what it is not for: series at intervals of a minute, in promtool's notation, for an hour.
INSTANCE = "{instance='a', job='sparkis'}"
SITUATIONS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "SparkisDown": ({f"up{INSTANCE}": "1x5 0x60"}, {f"up{INSTANCE}": "1x70"}),
    "SparkisNotReady": ({f"sparkis_ready{INSTANCE}": "0x70"}, {f"sparkis_ready{INSTANCE}": "1x56 0x2 1x9"}),
    "SparkisJobLags": (
        {"sparkis_job_lag_seconds{job_name='j'}": "31x70"},
        {"sparkis_job_lag_seconds{job_name='j'}": "2x70"},
    ),
    "SparkisJobStale": ({"sparkis_job_stale{job_name='j'}": "1x70"}, {"sparkis_job_stale{job_name='j'}": "0x70"}),
    "SparkisJobFails": ({"sparkis_job_failing{job_name='j'}": "1x70"}, {"sparkis_job_failing{job_name='j'}": "0x70"}),
    "SparkisJobUnreadable": (
        {f"sparkis_jobs_unreadable{INSTANCE}": "1x70"},
        {f"sparkis_jobs_unreadable{INSTANCE}": "1x3 0x70"},
    ),
    "SparkisInternalErrors": (
        {f"sparkis_internal_errors_total{INSTANCE}": "0x55 1x20"},
        {f"sparkis_internal_errors_total{INSTANCE}": "3x70"},
    ),
    "SparkisErrors": (
        {"sparkis_errors_total{error='LOADING'}": "0+120x70"},
        {"sparkis_errors_total{error='WRONGTYPE'}": "0+120x70", "sparkis_errors_total{error='BUSY'}": "0+6x70"},
    ),
    "SparkisClientsNearLimit": (
        {f"sparkis_connected_clients{INSTANCE}": "95x70", f"sparkis_clients_max{INSTANCE}": "100x70"},
        {f"sparkis_connected_clients{INSTANCE}": "80x70", f"sparkis_clients_max{INSTANCE}": "100x70"},
    ),
    "SparkisSlotsUnserved": (
        {f"sparkis_registry_slots_unowned{INSTANCE}": "10x70", f"sparkis_proxy_slots_unserved{INSTANCE}": "0x70"},
        {f"sparkis_registry_slots_unowned{INSTANCE}": "0x70", f"sparkis_proxy_slots_unserved{INSTANCE}": "0x70"},
    ),
    "SparkisServerLost": (
        {"sparkis_proxy_server_up{server='b:1'}": "0x70"},
        {"sparkis_proxy_server_up{server='b:1'}": "1x70"},
    ),
    "SparkisFailover": (
        {f"sparkis_registry_failovers_total{INSTANCE}": "0x50 1x20"},
        {f"sparkis_registry_failovers_total{INSTANCE}": "1x70"},
    ),
    # The last registry that Prometheus scraped is gone; a standby leads; there was never a registry.
    "SparkisRegistryMissing": (
        {"sparkis_registry_leader{instance='a'}": "1x20 stale", "sparkis_registry_leader{instance='b'}": "0x25 stale"},
        {"sparkis_registry_leader{instance='a'}": "1x20 stale", "sparkis_registry_leader{instance='b'}": "0x20 1x50"},
    ),
    "SparkisUpstreamDown": ({f"sparkis_upstream_up{INSTANCE}": "0x70"}, {f"sparkis_upstream_up{INSTANCE}": "1x70"}),
    "SparkisShadowDiffers": (
        {"sparkis_shadow_outcomes_total{rule='r', outcome='different'}": "0+1x70"},
        {
            "sparkis_shadow_outcomes_total{rule='r', outcome='equal'}": "0+9x70",
            "sparkis_shadow_outcomes_total{rule='r', outcome='different'}": "7x70",
        },
    ),
}

Query = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Query, Query]]:
    """A server whose job nobody writes any more, and what a Prometheus knows of it: by a query, and its alerts."""
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "log").mkdir()
    with LogWriter(folder / "log", "job", STATES, "first") as writer:
        writer.publish([Change("speed", Op.PUT, b"job:speed:%d" % number, value=b"7") for number in range(20)])
    metrics, port = free_port(), free_port()
    (folder / "alerts.yml").write_text(ALERT_DURATION.sub("for: 1s", ALERTS.read_text()))
    targets = [{"targets": [f"127.0.0.1:{metrics}"]}]
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [{"job_name": "sparkis", "static_configs": targets}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with ExitStack() as stack:
        server = stack.enter_context(
            sparkis_server(folder / "store", folder / "log", "--metrics", str(metrics), "--workers", "2")
        )
        command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
        prometheus = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        stack.callback(prometheus.wait)
        stack.callback(prometheus.terminate)

        def query_api(path: str) -> Any:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=30) as reply:
                    return json.load(reply)["data"]
            except OSError:
                return {}

        def query(expression: str) -> list[dict[str, Any]]:
            return list(query_api(f"query?{urllib.parse.urlencode({'query': expression})}").get("result", []))

        def alerts(name: str) -> list[dict[str, Any]]:
            found = query_api("alerts").get("alerts", [])
            return [each for each in found if each["labels"]["alertname"] == name and each["state"] == "firing"]

        eventually(lambda: query('up{job="sparkis"} == 1'), processes=[prometheus, server.process])
        yield server, query, alerts


def value_of(found: list[dict[str, Any]]) -> float:
    (only,) = found
    return float(only["value"][1])


def test_prometheus_reads_counts_of_requests(scraped: tuple[Running, Query, Query]) -> None:
    server, query, _ = scraped
    with server.connect() as client:
        for _ in range(10):
            client.call("GET", "job:speed:3")
    counted = 'sparkis_command_duration_seconds_count{group="string"}'
    eventually(lambda: query(counted), lambda found: found and value_of(found) == 10)
    quantile = "histogram_quantile(0.99, sum by (le) (sparkis_command_duration_seconds_bucket))"
    assert 0 < value_of(query(quantile)) < 60
    assert value_of(query('sparkis_state_keys{job_name="job", state="speed"}')) == 20
    assert {each["metric"]["job"] for each in query("sparkis_job_keys")} == {"sparkis"}


def test_every_query_of_dashboard_is_one_for_prometheus(scraped: tuple[Running, Query, Query]) -> None:
    _, query, _ = scraped
    panels = json.loads((DEPLOY / "grafana" / "sparkis.json").read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    values = {"$__rate_interval": "1m", "$target": ".*", "$instance": ".*"}
    for expression in expressions:
        for name, value in values.items():
            expression = expression.replace(name, value)
        # A mistake is an error of the request, which has no result.
        assert query(f"({expression}) or vector(1)"), expression


def test_alert_fires_only_for_job_without_writer(scraped: tuple[Running, Query, Query]) -> None:
    _, query, alerts = scraped
    (fired,) = eventually(lambda: alerts("SparkisJobStale"))
    assert fired["annotations"]["summary"] == "Nobody writes job job"
    fired = query('ALERTS{alertstate="firing"}')
    assert {each["metric"]["alertname"] for each in fired} == {"SparkisJobStale"}


def test_promtool_accepts_alerts_and_scrape(scraped: tuple[Running, Query, Query], tmp_path: Path) -> None:
    done = subprocess.run(["promtool", "check", "rules", str(ALERTS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    _, query, _ = scraped
    (target,) = query("sparkis_ready")
    with urllib.request.urlopen(f"http://{target['metric']['instance']}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_fires_in_its_situation_and_not_without_it(tmp_path: Path) -> None:
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    assert {rule["alert"] for rule in rules} == SITUATIONS.keys()

    def situation(series: dict[str, str], **fires: bool) -> dict[str, Any]:
        return {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}})',
                    "eval_time": "1h",
                    "exp_samples": [{"labels": "{}", "value": 1}] if does else [],
                }
                for name, does in fires.items()
            ],
        }

    tests = [situation({f"up{INSTANCE}": "1x70"}, **dict.fromkeys(SITUATIONS, False))]
    for name, (trouble, normal) in SITUATIONS.items():
        tests += [situation(trouble, **{name: True}), situation(normal, **{name: False})]
    (tmp_path / "situations.yml").write_text(
        yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests})
    )
    command = ["promtool", "test", "rules", str(tmp_path / "situations.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
