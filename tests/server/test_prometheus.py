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
HASTE = re.compile(r"for: \d+m")

Query = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Query, Query]]:
    """A server whose job nobody writes any more, and what a Prometheus knows of it: by a query, and its alerts."""
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "log").mkdir()
    with LogWriter(folder / "log", "job", STATES, "first") as writer:
        writer.publish([Change("speed", Op.PUT, b"job:speed:%d" % number, value=b"7") for number in range(20)])
    metrics, port = free_port(), free_port()
    (folder / "alerts.yml").write_text(HASTE.sub("for: 1s", ALERTS.read_text()))
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

        def asked(path: str) -> Any:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=30) as reply:
                    return json.load(reply)["data"]
            except OSError:
                return {}

        def query(expression: str) -> list[dict[str, Any]]:
            return list(asked(f"query?{urllib.parse.urlencode({'query': expression})}").get("result", []))

        def alerts(name: str) -> list[dict[str, Any]]:
            found = asked("alerts").get("alerts", [])
            return [each for each in found if each["labels"]["alertname"] == name and each["state"] == "firing"]

        eventually(lambda: query('up{job="sparkis"} == 1'), processes=[prometheus, server.process])
        yield server, query, alerts


def value_of(found: list[dict[str, Any]]) -> float:
    (only,) = found
    return float(only["value"][1])


def test_a_prometheus_reads_what_clients_did(scraped: tuple[Running, Query, Query]) -> None:
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


def test_every_query_of_the_dashboard_is_one_for_a_prometheus(scraped: tuple[Running, Query, Query]) -> None:
    _, query, _ = scraped
    panels = json.loads((DEPLOY / "grafana" / "sparkis.json").read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    values = {"$__rate_interval": "1m", "$target": ".*", "$instance": ".*"}
    for expression in expressions:
        for name, value in values.items():
            expression = expression.replace(name, value)
        # A mistake is an error of the request, which has no result.
        assert query(f"({expression}) or vector(1)"), expression


def test_an_alert_fires_for_a_job_that_nobody_writes_and_no_other(scraped: tuple[Running, Query, Query]) -> None:
    _, query, alerts = scraped
    (fired,) = eventually(lambda: alerts("SparkisJobStale"))
    assert fired["annotations"]["summary"] == "Nobody writes job job"
    fired = query('ALERTS{alertstate="firing"}')
    assert {each["metric"]["alertname"] for each in fired} == {"SparkisJobStale"}


def test_promtool_accepts_the_alerts_and_a_scrape(scraped: tuple[Running, Query, Query], tmp_path: Path) -> None:
    done = subprocess.run(["promtool", "check", "rules", str(ALERTS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    _, query, _ = scraped
    (target,) = query("sparkis_ready")
    with urllib.request.urlopen(f"http://{target['metric']['instance']}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
