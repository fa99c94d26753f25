"""Hadoop's daemons on loopback: a YARN cluster, each node at an address of its own, and an HDFS of one node."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen
from xml.sax.saxutils import escape

from pyspark.find_spark_home import _find_spark_home

from compat.conformance.servers import free_port
from compat.processes import killed_at_end
from compat.waiting import WAIT_S_MAX, eventually

# What `scripts/hadoop.sh` fetches.
JARS = Path(__file__).parents[2] / "build" / "hadoop" / "jars"
SPARK_JARS = Path(_find_spark_home()) / "jars"
JAVA_OPTIONS = [
    *("-Xmx384m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"),
    *("--add-opens", "java.base/java.lang=ALL-UNNAMED", "--add-opens", "java.base/java.util=ALL-UNNAMED"),
]
MANAGER = "127.0.0.1"
# Each node manager offers as much; a container of these tests is an application master, or an executor with its server.
NODE_MB = 4096
SETTINGS = {
    "fs.defaultFS": "file:///",
    "yarn.scheduler.minimum-allocation-mb": "256",
    "yarn.scheduler.capacity.root.queues": "default",
    "yarn.scheduler.capacity.root.default.capacity": "100",
    "yarn.scheduler.capacity.maximum-am-resource-percent": "1.0",
    "yarn.nodemanager.resource.memory-mb": str(NODE_MB),
    "yarn.nodemanager.aux-services": "",
    # The disk of the test's machine may be fuller than a node's may be.
    "yarn.nodemanager.disk-health-checker.enable": "false",
}


class Yarn:
    """A running cluster. folder: Hadoop's configuration for its clients (`HADOOP_CONF_DIR`)."""

    def __init__(self, folder: Path, web: str) -> None:
        self.folder, self._web = folder, f"http://{web}/ws/v1/cluster"

    @property
    def spark_settings(self) -> dict[str, str]:
        """The settings of a Spark application, whose jars are read where PySpark has them."""
        return {
            "spark.yarn.jars": f"local:{SPARK_JARS}/*",
            "spark.yarn.stagingDir": f"file://{self.folder}/staging",
            "spark.yarn.am.memory": "512m",
            "spark.executor.instances": "2",
            "spark.executor.memoryOverhead": "768m",
        }

    def nodes(self) -> int:
        """Return how many node managers run."""
        with suppress(OSError):
            return int(self._get("metrics")["clusterMetrics"]["activeNodes"])
        return 0

    def running(self) -> list[str]:
        """Return the ids of the applications that have not ended."""
        applications = (self._get("apps")["apps"] or {}).get("app", [])
        return [each["id"] for each in applications if each["finalStatus"] == "UNDEFINED"]

    def containers(self) -> int:
        """Return how many containers run."""
        return int(self._get("metrics")["clusterMetrics"]["containersAllocated"])

    def kill(self, application: str) -> None:
        """End an application, as `yarn application -kill` does."""
        body, headers = json.dumps({"state": "KILLED"}).encode(), {"Content-Type": "application/json"}
        asked = Request(f"{self._web}/apps/{application}/state", body, headers, method="PUT")
        urlopen(asked, timeout=WAIT_S_MAX).close()

    def end(self) -> None:
        """End what a test has left: containers would survive their node manager."""
        for application in self.running():
            self.kill(application)
        eventually(self.containers, lambda found: found == 0, awaited="the end of all containers")

    def _get(self, what: str) -> Any:
        with urlopen(f"{self._web}/{what}", timeout=WAIT_S_MAX) as answer:
            return json.load(answer)


def _written(folder: Path, settings: Mapping[str, str]) -> Path:
    """Write Hadoop's configuration into a folder."""
    folder.mkdir()
    rows = "".join(
        f"<property><name>{name}</name><value>{escape(value)}</value></property>" for name, value in settings.items()
    )
    for name in ("core-site.xml", "yarn-site.xml", "capacity-scheduler.xml", "hdfs-site.xml"):
        (folder / name).write_text(f"<configuration>{rows}</configuration>")
    return folder


def _command(daemon: str, folder: Path, *options: str) -> list[str]:
    java = Path(os.environ["JAVA_HOME"]) / "bin" / "java"
    classes = f"{folder}:{JARS}/*:{SPARK_JARS}/*"
    return [str(java), *JAVA_OPTIONS, "-cp", classes, f"org.apache.hadoop.{daemon}", *options]


@contextmanager
def _running(folder: Path, commands: Mapping[str, list[str]]) -> Iterator[list[subprocess.Popen[Any]]]:
    """Run daemons while the block runs."""
    with ExitStack() as stack:
        processes = []
        for name, command in commands.items():
            output = stack.enter_context((folder / f"{name}.log").open("wb"))
            processes.append(stack.enter_context(killed_at_end(command, stdout=output, stderr=output, cwd=folder)))
        yield processes


def _addresses(prefix: str, host: str, *names: str) -> dict[str, str]:
    return {f"yarn.{prefix}.{name}": f"{host}:{free_port()}" for name in names}


@contextmanager
def yarn(folder: Path, nodes: int) -> Iterator[Yarn]:
    """Run a resource manager and node managers while the block runs."""
    names = ("address", "scheduler.address", "resource-tracker.address", "admin.address", "webapp.address")
    common = SETTINGS | {"yarn.resourcemanager.hostname": MANAGER} | _addresses("resourcemanager", MANAGER, *names)
    commands = {"manager": _command("yarn.server.resourcemanager.ResourceManager", _written(folder / "conf", common))}
    for number in range(1, nodes + 1):
        host, name = f"127.0.0.{number}", f"node{number}"
        folders = {f"yarn.nodemanager.{kind}-dirs": str(folder / f"{name}-{kind}") for kind in ("local", "log")}
        names = ("address", "localizer.address", "webapp.address", "collector-service.address")
        own = {"yarn.nodemanager.hostname": host} | folders | _addresses("nodemanager", host, *names)
        commands[name] = _command("yarn.server.nodemanager.NodeManager", _written(folder / name, common | own))
    cluster = Yarn(folder / "conf", common["yarn.resourcemanager.webapp.address"])
    with _running(folder, commands) as processes:
        eventually(cluster.nodes, lambda found: found == nodes, awaited="node managers", processes=processes)
        try:
            yield cluster
        finally:
            cluster.end()


@contextmanager
def hdfs(folder: Path) -> Iterator[str]:
    """Run a name node and a data node while the block runs; yield the address of their filesystem."""
    address, web = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    settings = {
        "fs.defaultFS": f"hdfs://{address}",
        "dfs.replication": "1",
        "dfs.namenode.rpc-address": address,
        "dfs.namenode.http-address": web,
        "dfs.namenode.name.dir": str(folder / "names"),
        "dfs.datanode.data.dir": str(folder / "data"),
    } | {f"dfs.datanode.{name}": "127.0.0.1:0" for name in ("address", "ipc.address", "http.address")}
    conf = _written(folder / "conf", settings)
    name_node = "hdfs.server.namenode.NameNode"
    subprocess.run(_command(name_node, conf, "-format", "-nonInteractive"), check=True, capture_output=True)
    commands = {"name-node": _command(name_node, conf), "data-node": _command("hdfs.server.datanode.DataNode", conf)}
    with _running(folder, commands) as processes:
        eventually(lambda: _data_nodes(web), lambda found: found == 1, awaited="a data node", processes=processes)
        yield f"hdfs://{address}"


def _data_nodes(web: str) -> int:
    """Return how many data nodes a name node has."""
    asked = f"http://{web}/jmx?qry=Hadoop:service=NameNode,name=FSNamesystemState"
    with suppress(OSError), urlopen(asked, timeout=WAIT_S_MAX) as answer:
        return sum(int(bean["NumLiveDataNodes"]) for bean in json.load(answer)["beans"])
    return 0
