"""redis_exporter: what Prometheus gets of a server: the metrics of the exporter's own dashboard, and single keys."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic, sleep
from urllib.error import URLError
from urllib.request import urlopen

from compat.client_programs.python.steps import PLACE, WAIT_S_MAX, address, ask, text, until_equal
from compat.conformance.servers import free_port

# The metrics of the dashboard for Grafana that comes with the exporter.
DASHBOARD = (
    "blocked_clients",
    "commands_duration_seconds_total",
    "commands_total",
    "connected_clients",
    "db_keys",
    "db_keys_expiring",
    "evicted_keys_total",
    "expired_keys_total",
    "keyspace_hits_total",
    "keyspace_misses_total",
    "memory_max_bytes",
    "memory_used_bytes",
    "net_input_bytes_total",
    "net_output_bytes_total",
    "up",
    "uptime_in_seconds",
)
KEYS = (text(7), "job:text:long", "job:map:flight", "job:list:alerts", "job:set:airports", "job:ranks:delays")


def main() -> None:
    options = ["-is-cluster=true"] if PLACE == "cluster" else []
    with exporter(*options, "-check-single-keys", ",".join(KEYS)) as scraped:
        first = values(scraped())
        show("metrics of the dashboard", sorted({name for name, _ in first} & set(DASHBOARD)))
        show("errors of the scrape", first["exporter_last_scrape_error", '{err=""}'])
        for key in KEYS:
            show(f"the size of {key}", size(first, key))
        show("the value of a text", first["key_value", labels(text(7))])
        processed = "commands_processed_total", ""
        show("counters grow", values(scraped())[processed] > first[processed])
        if PLACE == "cluster":
            ask("kill", text(7))
            show("after a server's end", until_equal(lambda: size(values(scraped()), text(7)), 1.0))


def show(name: str, result: object) -> None:
    print(f"{name}: {result!r}", flush=True)


@contextmanager
def exporter(*options: str) -> Iterator[Callable[[], str]]:
    """Run the exporter; yield a function that returns its page."""
    at, port = address(), free_port()
    command = ["prometheus-redis-exporter", "-redis.addr", f"redis://{at['host']}:{at['port']}", *options]
    with subprocess.Popen([*command, "-web.listen-address", f"127.0.0.1:{port}"], stderr=subprocess.DEVNULL) as process:
        try:
            yield lambda: page(port)
        finally:
            process.kill()


def page(port: int) -> str:
    """Return the exporter's page, as soon as it listens."""
    end = monotonic() + WAIT_S_MAX
    while True:
        try:
            with urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
                return str(reply.read(), "utf-8")
        except URLError:
            if monotonic() > end:
                raise
            sleep(0.01)


def values(scraped: str) -> dict[tuple[str, str], float]:
    """Return values by name and labels."""
    lines: Sequence[tuple[str, str, str]] = re.findall(r"^redis_(\w+)(\{.*\})? (\S+)$", scraped, re.MULTILINE)
    return {(name, given): float(value) for name, given, value in lines}


def labels(key: str) -> str:
    return f'{{db="db0",key="{key}"}}'


def size(found: dict[tuple[str, str], float], key: str) -> float | None:
    """Return a key's length or number of elements; None if the scrape did not find it."""
    return found.get(("key_size", labels(key)))


main()
