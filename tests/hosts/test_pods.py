"""The pods of deploy/kubernetes/cluster.yaml as processes, each on a host of its own: their commands, ports and probes.

There is no kubelet: this module does what one does to start such a pod's container, but without the image.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import redis
import yaml

from benchmarks.chaos.fleet import ClusterRecord
from compat.conformance.servers import child_environment
from compat.waiting import WAIT_S_MAX, eventually
from tests.builders import put_value, value_state, write_log
from tests.hosts.network import Host, Network

MANIFEST = Path(__file__).parents[2] / "deploy" / "kubernetes" / "cluster.yaml"
SPARKIS = Path(sys.executable).with_name("sparkis")
SECRET = "of-the-pods"
KEY, VALUE = "job:s:a", b"1"


class Pod:
    """A pod: a host with its address, and its container's process."""

    def __init__(self, host: Host, container: Mapping[str, Any], volumes: Mapping[str, Path], output: Path) -> None:
        self.host, self._container = host, container
        fields = {"status.podIP": host.address, "spec.nodeName": host.name}
        variables = {each["name"]: _value(each["valueFrom"], fields) for each in container["env"]}
        mounts = {each["mountPath"]: str(volumes[each["name"]]) for each in container["volumeMounts"]}
        words = [_resolved(word, variables, mounts) for word in container["args"]]
        self._process = host.start([str(SPARKIS), *words], log=output, environment=child_environment() | variables)

    @property
    def output(self) -> str:
        """What its process has said."""
        return f"{self.host.name}: {self._process.output}"

    def passes(self, probe: str) -> bool:
        """Return whether a probe of its container succeeds now."""
        asked = self._container[probe]["httpGet"]
        (port,) = (each["containerPort"] for each in self._container["ports"] if each["name"] == asked["port"])
        with suppress(OSError), urlopen(f"http://{self.host.address}:{port}{asked['path']}", timeout=WAIT_S_MAX):
            return True
        return False


def _value(source: Mapping[str, Any], fields: Mapping[str, str]) -> str:
    return fields[source["fieldRef"]["fieldPath"]] if "fieldRef" in source else SECRET


def _resolved(word: str, variables: Mapping[str, str], mounts: Mapping[str, str]) -> str:
    """Return an argument with the values of variables, and the folders that are mounted in the container."""
    word = re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word)
    mounted = next((path for path in mounts if word.startswith(f"{path}/") or word == path), "")
    return word.replace(mounted, mounts[mounted], 1) if mounted else word


class Pods:
    """The pods of the manifest, which are started component by component."""

    def __init__(self, network: Network, folder: Path) -> None:
        self._network, self._folder, self.log = network, folder, folder / "log"
        self.running: dict[str, Pod] = {}
        found = [each for each in yaml.safe_load_all(MANIFEST.read_text()) if "template" in each.get("spec", {})]
        self._specs = {each["metadata"]["name"]: each["spec"] for each in found}

    def start(self, component: str) -> list[Pod]:
        """Start all pods of a component."""
        replicas = range(self._specs[component]["replicas"])
        return [self.start_one(component, f"{component.rpartition('-')[2]}{each}") for each in replicas]

    def start_one(self, component: str, name: str, *, store_of: str = "") -> Pod:
        """Start a pod. store_of: the pod whose volume it gets, which has ended."""
        store = self._folder / (store_of or name)
        store.mkdir(exist_ok=True)
        (container,) = self._specs[component]["template"]["spec"]["containers"]
        volumes = {"log": self.log, "store": store, "tmp": self._folder}
        made = Pod(self._network.host(name), container, volumes, self._folder / f"{name}.txt")
        self.running[name] = made
        return made

    def output(self) -> str:
        """What all pods have said."""
        return "\n".join(each.output[-1500:] for each in self.running.values())


def test_pods_of_cluster_start_in_any_order_and_state_server_is_replica_at_new_address(tmp_path: Path) -> None:
    with Network(tmp_path) as network, network.host("client").network():
        pods = Pods(network, tmp_path)
        write_log(pods.log, "job", [value_state("s")], [put_value("s", KEY.encode(), VALUE)])
        servers = pods.start("sparkis-state-server")
        eventually(lambda: all(each.passes("livenessProbe") for each in servers), awaited=pods.output)
        assert not any(each.passes("readinessProbe") for each in servers)
        pods.start("sparkis-registry")
        others = [*pods.start("sparkis-registry-standby"), *pods.start("sparkis-proxy")]
        proxy = redis.Redis(others[-1].host.address, password=SECRET, port=7379, retry=None)  # type: ignore[arg-type]
        eventually(lambda: all(each.passes("readinessProbe") for each in pods.running.values()), awaited=pods.output)
        assert proxy.get(KEY) == VALUE
        record = ClusterRecord(pods.log)
        old = servers[-1].host
        old.stop()
        eventually(lambda: record.online() == len(servers) - 1, awaited=pods.output)
        moved = pods.start_one("sparkis-state-server", "moved", store_of=old.name)
        eventually(lambda: moved.passes("readinessProbe") and record.online() == len(servers), awaited=pods.output)
        (node,) = (node for node in record.topology()["nodes"] if node["host"] == moved.host.address)
        assert node["replica_of"]
        assert proxy.get(KEY) == VALUE
        proxy.close()
