"""A cluster whose programs run on hosts of their own: registry and standby, state servers, proxies, a Redis, a writer.

    hosts      registry  standby  server0 ...  proxy0  proxy1  upstream  driver  spark  store  client
    log        a shared folder, which each host mounts; a host whose mount is taken away finds an empty one
               or in an object store on a host of its own

The writer is a program without Spark, or a Spark job (`benchmarks.chaos.job`) on a standalone cluster.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis
from pyspark.find_spark_home import _find_spark_home

from benchmarks.chaos.fleet import ClusterRecord
from benchmarks.chaos.relay import Relay
from compat.conformance.servers import child_environment
from compat.object_store import s3_server
from compat.waiting import POLL_INTERVAL_S, eventually
from tests.hosts.network import Host, HostProcess, Network

TOKEN = "of-the-hosts"
REGISTRY_PORT, SERVER_PORT, PROXY_PORT, UPSTREAM_PORT = 7377, 7400, 7379, 6379
# A client waits for longer than any promise of the servers.
CLIENT_TIMEOUT_S = 60.0
PROGRAMS = "resp_server.programs"
BUCKET = "hosts"
# Each look at a log in the object store is some requests.
STORE_POLL_S = 0.2


class World:
    """The programs, by the names of their hosts.

    Attributes:
        log: The folder of the log, which is empty if it is in an object store.
        root: The address of the log for the programs.
        record: What the log says; this process reads it whatever happens to the hosts.
        variables: The environment that this process needs to read it.
        poll_s: How long to wait between two looks at it.
    """

    def __init__(
        self,
        folder: Path,
        network: Network,
        *,
        servers: int,
        replicas: int = 0,
        has_spark: bool = False,
        has_store: bool = False,
    ) -> None:
        self.folder, self.network = folder, network
        self.servers, self._replicas, self.has_spark, self.has_store = servers, replicas, has_spark, has_store
        self.shared, self.log = folder / "shared", folder / "log"
        for each in (self.shared, self.log):
            each.mkdir()
        self.running: dict[str, HostProcess] = {}
        self.options_of: dict[str, tuple[str, ...]] = {}
        self._environment = child_environment() | {"SPARKIS_CONTROL_TOKEN": TOKEN}
        self.client = self.host("client")
        self.variables: dict[str, str] = {}
        self.root, self.poll_s = str(self.log), POLL_INTERVAL_S
        if has_store:
            self.root, self.poll_s = f"s3://{BUCKET}/log", STORE_POLL_S
            self._start_store()
        self.record = ClusterRecord(self.root if has_store else self.shared)

    # -- hosts --------------------------------------------------------------------------------------------------------

    def host(self, name: str) -> Host:
        """Return a host; a new one mounts the log's folder."""
        is_new = name not in self.network.hosts
        host = self.network.host(name)
        if is_new and not self.has_store:
            host.mount(self.log, shared=self.shared)
        return host

    def start_again(self, name: str) -> None:
        """Start a host that was stopped."""
        self.network.start_up(self.network.hosts[name])

    def lose_log(self, *names: str) -> None:
        """Take the log's folder away from hosts."""
        for name in names:
            self.network.hosts[name].unmount(self.log)

    def find_log(self, *names: str) -> None:
        """Mount the log's folder again."""
        for name in names:
            self.network.hosts[name].mount(self.log, shared=self.shared)

    def _start_store(self) -> None:
        """Start an S3 server. This process reaches it by a relay, which connects from the clients' host."""
        host = self.host("store")
        words = [sys.executable, "-m", "compat.object_store.s3_server", BUCKET, host.address]
        output = host.start(words, log=self._log_of("store"), environment=self._environment).popen.stdout
        assert output is not None
        port = int(output.readline())
        self._environment |= s3_server.environment(port, host.address)
        relay = Relay(self.client.network)
        relay.route_to(host.address, port)
        self.variables = s3_server.environment(relay.port)

    # -- programs -----------------------------------------------------------------------------------------------------

    def start_registry(self, name: str = "registry", *options: str) -> None:
        """Start a registry, or with `--standby` one that takes over."""
        given = ["--log", self.root, "--port", str(REGISTRY_PORT), "--replicas", str(self._replicas), *options]
        self.options_of[name] = options
        self._start(name, f"{PROGRAMS}.registry", given)
        if "--standby" not in options:
            self.running[name].read_json()

    def start_server(self, number: int, *options: str, disk: int = 0, is_awaited: bool = True) -> None:
        """Start a state server. disk: the size of a disk of its own, which is empty at first."""
        name = f"server{number}"
        store = self.folder / f"store{number}"
        store.mkdir(exist_ok=True)
        if disk and not self.host(name).has_mounted(store):
            self.host(name).mount(store, bytes_max=disk)
        given = ["--log", self.root, "--store", str(store), "--port", str(SERVER_PORT), *options]
        self._start(name, f"{PROGRAMS}.state_server", given, is_open=True, is_awaited=is_awaited)

    def start_proxy(self, number: int, *options: str) -> None:
        """Start a proxy. options: instead of those that find the servers by the log."""
        given = options or ("--log", self.root)
        self._start(f"proxy{number}", f"{PROGRAMS}.proxy", ["--port", str(PROXY_PORT), *given], is_open=True)

    def start_upstream(self) -> None:
        """Start a real redis-server."""
        host = self.host("upstream")
        given = ["--port", str(UPSTREAM_PORT), "--bind", host.address, "--protected-mode", "no", "--save", ""]
        self.running[host.name] = host.start(["redis-server", *given, "--dir", str(self.folder)])
        with self.client.network():
            eventually(self._upstream_answers, awaited="redis-server")

    def _upstream_answers(self) -> bool:
        with suppress(redis.RedisError), redis.Redis(self.network.hosts["upstream"].address, UPSTREAM_PORT) as client:
            return bool(client.ping())
        return False

    def upstream_options(self, number: int) -> tuple[str, ...]:
        """Return the options of a proxy with the upstream."""
        url = f"redis://{self.host('upstream').address}:{UPSTREAM_PORT}"
        owners = str(self.folder / f"owners{number}.json")
        return ("--log", self.root, "--upstream", url, "--ownership", owners, "--new-jobs", "take")

    def start_writer(self) -> int:
        """Start the writer without Spark; return the last epoch."""
        self._start("driver", "tests.hosts.writer", [self.root])
        return int(self.running["driver"].read_json()["epoch"])

    def tell_writer(self, command: str) -> dict[str, Any]:
        """Give the writer a command; return its reply."""
        writer = self.running["driver"]
        assert writer.popen.stdin is not None
        writer.popen.stdin.write(f"{command}\n".encode())
        writer.popen.stdin.flush()
        return writer.read_json()

    def start_spark(self) -> None:
        """Start a standalone cluster of one worker with two cores."""
        host = self.host("spark")
        common = ["--host", host.address, "--webui-port", "0", "--port"]
        master = self._start_spark_program("master.Master", *common, "7077")
        self._wait_for_line(master, r"Starting Spark master at spark://")
        own = ["--cores", "2", "--memory", "2g", "--work-dir", str(self.folder / "work")]
        worker = self._start_spark_program("worker.Worker", *common, "0", *own, f"spark://{host.address}:7077")
        self._wait_for_line(worker, r"Successfully registered with master")

    def _start_spark_program(self, name: str, *arguments: str) -> HostProcess:
        host = self.host("spark")
        environment = self._environment | {"SPARK_LOCAL_IP": host.address, "SPARK_NO_DAEMONIZE": "1"}
        command = [f"{_find_spark_home()}/bin/spark-class", f"org.apache.spark.deploy.{name}", *arguments]
        return host.start(command, log=self._log_of(name), environment=environment)

    def start_driver(self) -> None:
        """Start the Spark job, or start it again from its checkpoint."""
        host, spark = self.host("driver"), self.host("spark")
        given = ["--log", self.root, "--checkpoint", str(self.folder / "checkpoint"), "--host", host.address]
        self._start("driver", "benchmarks.chaos.job", [*given, "--master", f"spark://{spark.address}:7077"])
        self.running["driver"].read_json()

    def _wait_for_line(self, process: HostProcess, pattern: str) -> None:
        eventually(lambda: re.search(pattern, process.output), awaited=pattern, processes=[process.popen])

    def start_any_writer(self) -> None:
        """Start the Spark job, if this world has one, else the writer without Spark; it writes."""
        if not self.has_spark:
            self.start_writer()
            self.tell_writer("go")
            return
        if "spark" not in self.network.hosts:
            self.start_spark()
        self.start_driver()
        eventually(lambda: self.record.committed() >= 0, awaited=self.output)

    def _start(
        self, name: str, module: str, given: Sequence[str], *, is_open: bool = False, is_awaited: bool = True
    ) -> None:
        host = self.host(name)
        options = ["--child", *given] if module.startswith(PROGRAMS) else [*given]
        if module.startswith(PROGRAMS):
            options += ["--bind", host.address]
        if is_open:  # there is no password
            options += ["--protected-mode", "no"]
        environment = self._environment | {"SPARK_LOCAL_IP": host.address}
        command = [sys.executable, "-m", module, *options]
        self.running[name] = host.start(command, log=self._log_of(name), environment=environment)
        if is_open and is_awaited:
            self.running[name].read_json()

    def _log_of(self, name: str) -> Path:
        return self.folder / f"{name}.txt"

    def end(self, name: str) -> None:
        """Kill a program, with nothing else of its host."""
        self.running.pop(name).kill()

    # -- what is there ------------------------------------------------------------------------------------------------

    def connect(self, name: str = "proxy0", timeout_s: float = CLIENT_TIMEOUT_S) -> redis.Redis:
        """Return a client of a proxy, server or the upstream. For use within `client.network()`."""
        ports = {"proxy": PROXY_PORT, "server": SERVER_PORT, "upstream": UPSTREAM_PORT}
        port = ports[name.rstrip("0123456789")]
        address = self.network.hosts[name].address
        return redis.Redis(address, port, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=None)  # type: ignore[arg-type]

    def masters(self) -> list[str]:
        """Return the hosts of the servers that own slots."""
        names = {host.address: name for name, host in self.network.hosts.items()}
        return [names[address.partition(":")[0]] for address in self.record.owners()]

    def wait_until_complete(self) -> None:
        """Wait until all servers are in the topology and serve their slots."""

        def is_complete() -> bool:
            with suppress(OSError, ValueError, TypeError):  # it is being written, or has no topology yet
                return self.record.online() == self.servers and self._are_shards_whole()
            return False

        eventually(is_complete, awaited=self.output, interval_s=self.poll_s)

    def _are_shards_whole(self) -> bool:
        return len(self.record.owners()) == max(1, self.servers // (self._replicas + 1))

    def output(self) -> str:
        """Return the last lines of each program, and where the log stands."""
        texts = [f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in self.folder.glob("*.txt")]
        with suppress(Exception):
            texts.append(f"committed {self.record.committed()}, {self.record.topology()}")
        return "\n".join(texts)


def wait_for_epochs(world: World, count: int) -> None:
    """Wait until more epochs are committed."""
    before = world.record.committed()
    eventually(lambda: world.record.committed() >= before + count, awaited=world.output, interval_s=world.poll_s)
