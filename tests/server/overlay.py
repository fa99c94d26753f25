"""A real Redis as the upstream, two servers of a job's states, and a proxy in front of all: processes of a test."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from compat.conformance.certificates import Authority
from compat.conformance.servers import Running, child_environment, free_port, redis_server
from compat.waiting import eventually
from spark_hooks.cli import main
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from tests.server.nodes import HALVES, Nodes
from tests.server.redis_cluster import RedisCluster

STATES = [
    StateDescriptor("speed", key="car", value="kmh"),
    StateDescriptor("apdex", key_format="dash/<account>/apdex", value="score"),
]
# The states' keys with values; and keys that the states own, but do not have.
VALUES = {b"job:speed:%d" % number: b"%d" % (number * 10) for number in range(8)} | {b"dash/7/apdex": b"0.9"}
ABSENT = b"job:speed:absent"
OLD = b"an old copy"
PREFIX = "--upstream-tls-"


def publish_values(log: Path) -> None:
    """Publish the values of the states' keys."""
    with LogWriter(log, "job", STATES, "first") as writer:
        states = {key: "speed" if key.startswith(b"job:") else "apdex" for key in VALUES}
        writer.publish([Change(states[key], Op.PUT, key, value=value) for key, value in VALUES.items()])


class Overlay(Nodes):
    """The upstream has an old copy of each key of the states. rules: the text of a file of rules."""

    def __init__(self, folder: Path, stack: ExitStack, *options: str, rules: str | None = None) -> None:
        super().__init__(folder, stack, *HALVES)
        self.folder = folder
        self.routes = folder / "routes.toml"
        self.ownership = folder / "owners.json"
        self.upstream_port = free_port()
        self.upstream_folder = folder / "upstream"
        self.upstream_folder.mkdir()
        self.upstream = self.start_upstream()
        publish_values(self.log)
        self.nodes = [self.start(at) for at in range(len(self.ports))]
        if rules is None:
            self.proxy = self.start_overlay(*options)
        else:
            self.routes.write_text("")
            self.proxy = self.start_overlay("--routes", str(self.routes), *options)
            self.use_rules(rules)

    def start_upstream(self, *options: str) -> Running:
        """Start the upstream; again, after it was killed."""
        server = redis_server(self.upstream_folder, *options, port=self.upstream_port)
        self.upstream = self._stack.enter_context(server)
        with self.upstream.connect() as connection:
            connection.call("MSET", *(word for key in [*VALUES, ABSENT] for word in (key, OLD)))
        return self.upstream

    def start_overlay(self, *options: str, is_ready: bool = True) -> Running:
        """Start a proxy with the upstream; is_ready: wait until it answers keys of both backends."""
        url = f"redis://127.0.0.1:{self.upstream_port}"
        proxy = self.start_proxy("--upstream", url, "--ownership", str(self.ownership), *options)
        if is_ready:
            self.wait_until_ready(proxy)
        return proxy

    def start_at(self, url: str, *options: str) -> Running:
        """Start a proxy with another upstream, and another file of owners."""
        ownership = self.folder / f"owners{free_port()}.json"
        return self.start_proxy("--upstream", url, "--ownership", str(ownership), *options)

    def start_before(self, cluster: RedisCluster, *options: str) -> Running:
        """Start a proxy with a Redis Cluster as its upstream; wait until it answers keys of both backends."""
        proxy = self.start_at(cluster.url, *options)
        with proxy.connect() as client:
            eventually(lambda: client.call("GET", "job:speed:3").plain == b"30")
            eventually(lambda: not client.call("GET", "nobody's").is_error)
        return proxy

    def use_rules(self, rules: str) -> None:
        """Write the file of rules, and have the proxy read it."""
        self.routes.write_text(rules)
        with self.proxy.connect() as client:
            assert not client.call("STATE", "RELOAD").is_error

    def publish(self, *changes: Change) -> None:
        """Publish an epoch of the job."""
        with LogWriter(self.log, "job", STATES, "first") as writer:
            writer.publish(list(changes))

    def wait_until_ready(self, proxy: Running) -> None:
        """Wait until a proxy knows the owners of keys, and both sides answer."""
        with proxy.connect() as client:
            for key, value in VALUES.items():
                eventually(lambda key=key: client.call("GET", key).plain, lambda found, is_=value: found == is_)  # type: ignore[misc]
            eventually(lambda: not client.call("GET", "nobody's").is_error)

    def signal_upstream(self, number: signal.Signals) -> None:
        """Send a signal to the upstream."""
        self.upstream.process.send_signal(number)
        if number is signal.SIGKILL:
            self.upstream.process.wait()

    def info(self, proxy: Running | None = None) -> dict[str, str]:
        """Return the fields of the proxy's own section of INFO."""
        with (proxy or self.proxy).connect() as client:
            lines = client.call("INFO", "proxy").plain.decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)


def sparkis(proxy: Running, command: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a `sparkis` command at a proxy, in this process: most of the time of another is its start."""
    line = [command, "--url", f"redis://127.0.0.1:{proxy.port}", *words]
    with redirect_stdout(StringIO()) as output, redirect_stderr(StringIO()) as errors:
        code = main(line)
    return subprocess.CompletedProcess(line, code, output.getvalue(), errors.getvalue())


def start_job(overlay: Overlay, job: str, key_format: str, *keys: str) -> None:
    """Publish a job with one state."""
    states = [StateDescriptor("total", key_format=key_format, value="n")]
    with LogWriter(overlay.log, job, states, f"first-of-{job}") as writer:
        writer.publish([Change("total", Op.PUT, key.encode(), value=b"of the state") for key in keys])


def swap_check(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `sparkis swap-check`, in an environment without our other settings."""
    line = [sys.executable, "-m", "sparkis", "swap-check", *words]
    return subprocess.run(line, env=child_environment() | environment, capture_output=True, text=True, check=False)


def delete_copies(overlay: Overlay, *words: str, proxies: tuple[Running, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Have `sparkis swap-check` delete the old copies; proxies: those that it asks, by default the overlay's."""
    named = [word for proxy in proxies or (overlay.proxy,) for word in ("--proxy", f"redis://127.0.0.1:{proxy.port}")]
    return swap_check("--upstream", f"redis://127.0.0.1:{overlay.upstream_port}", "--delete-copies", *named, *words)


def tls_options(authority: Authority, name: str) -> list[str]:
    """Return the options of a connection to an upstream with TLS, with a certificate of this name."""
    cert, key = authority.issue(name)
    return [f"{PREFIX}ca-cert-file", str(authority.ca), f"{PREFIX}cert-file", str(cert), f"{PREFIX}key-file", str(key)]
