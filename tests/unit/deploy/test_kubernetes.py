"""The manifests for Kubernetes fit together, to the image, and to the options of `sparkis`.

`make check` validates them against the schemas of Kubernetes.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

import sparkis
from tests.unit.deploy.command_lines import CONTAINERFILE, DEPLOY, USER, options_of

MANIFESTS = sorted(path.name for path in (DEPLOY / "kubernetes").glob("*.yaml"))
WORKLOADS = ("Deployment", "StatefulSet")


def objects_of(manifest: str, *kinds: str) -> list[dict[str, Any]]:
    """Return the objects of a manifest that are of some kinds, or all of them."""
    found = yaml.safe_load_all((DEPLOY / "kubernetes" / manifest).read_text())
    return [each for each in found if not kinds or each["kind"] in kinds]


def workloads() -> list[Any]:
    """Return a parameter for each workload of each manifest."""
    return [
        pytest.param(each, id=f"{manifest}-{each['metadata']['name']}")
        for manifest in MANIFESTS
        for each in objects_of(manifest, *WORKLOADS)
    ]


def container_of(workload: dict[str, Any]) -> dict[str, Any]:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return dict(container)


def labels_of(workload: dict[str, Any]) -> dict[str, str]:
    return dict(workload["spec"]["template"]["metadata"]["labels"])


@pytest.mark.parametrize("workload", workloads())
def test_pod_starts_command_with_options_that_exist(workload: dict[str, Any]) -> None:
    container = container_of(workload)
    variables = {each["name"] for each in container["env"]}
    named = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
    assert named <= variables
    options = options_of([re.sub(r"\$\(\w+\)", "10.0.0.1", word) for word in container["args"]])
    port, metrics = (each["containerPort"] for each in container["ports"])
    assert options.port == port and options.metrics == ("0.0.0.0", metrics)
    annotations = workload["spec"]["template"]["metadata"]["annotations"]
    assert annotations == {"prometheus.io/scrape": "true", "prometheus.io/port": str(metrics)}


@pytest.mark.parametrize("workload", workloads())
def test_pod_has_no_more_rights_than_it_needs(workload: dict[str, Any]) -> None:
    pod, container = workload["spec"]["template"]["spec"], container_of(workload)
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == USER
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    rights = container["securityContext"]
    assert rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"]
    assert rights["capabilities"] == {"drop": ["ALL"]}
    assert {"cpu", "memory"} <= set(container["resources"]["requests"]) and "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("workload", workloads())
def test_probes_of_pod_are_livez_and_readyz(workload: dict[str, Any]) -> None:
    container = container_of(workload)
    assert [each["name"] for each in container["ports"]][1:] == ["metrics"]
    asked = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert asked == [{"path": path, "port": "metrics"} for path in ("/livez", "/readyz", "/livez")]


@pytest.mark.parametrize("workload", workloads())
def test_pod_mounts_volumes_that_it_has_and_its_secrets_have_known_keys(workload: dict[str, Any]) -> None:
    claims = [each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", [])]
    volumes = [each["name"] for each in workload["spec"]["template"]["spec"]["volumes"]]
    container = container_of(workload)
    assert sorted(each["name"] for each in container["volumeMounts"]) == sorted(claims + volumes)
    secrets = [each["valueFrom"]["secretKeyRef"] for each in container["env"] if "secretKeyRef" in each["valueFrom"]]
    assert {(each["name"], each["key"]) for each in secrets} <= {
        ("sparkis", "password"),
        ("sparkis", "control-token"),
        ("sparkis", "upstream"),
    }


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_services_and_budgets_choose_pods_of_one_workload(manifest: str) -> None:
    pods = [labels_of(each) for each in objects_of(manifest, *WORKLOADS)]
    assert len({json.dumps(labels) for labels in pods}) == len(pods)
    chosen = [each["spec"]["selector"] for each in objects_of(manifest, "Service")]
    budgets = [each["spec"]["selector"]["matchLabels"] for each in objects_of(manifest, "PodDisruptionBudget")]
    assert chosen and budgets and [each for each in chosen + budgets if each not in pods] == []
    for each in objects_of(manifest, *WORKLOADS):
        assert each["spec"]["selector"]["matchLabels"] == labels_of(each)
    served = [each["metadata"]["name"] for each in objects_of(manifest, "Service")]
    named = [each["spec"]["serviceName"] for each in objects_of(manifest, "StatefulSet")]
    assert [name for name in named if name not in served] == []


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_more_than_one_pod_has_budget(manifest: str) -> None:
    budgets = [each["spec"]["selector"]["matchLabels"] for each in objects_of(manifest, "PodDisruptionBudget")]
    many = [labels_of(each) for each in objects_of(manifest, *WORKLOADS) if each["spec"]["replicas"] > 1]
    assert many and budgets == many


def test_standby_avoids_node_of_its_registry() -> None:
    pods = {each["metadata"]["name"]: each for each in objects_of("cluster.yaml", "Deployment")}
    affinity = pods["sparkis-registry-standby"]["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"]
    (preferred,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert preferred["podAffinityTerm"]["labelSelector"]["matchLabels"] == labels_of(pods["sparkis-registry"])
    assert preferred["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"


def test_manifests_and_image_have_one_version() -> None:
    images = {container_of(each)["image"] for name in MANIFESTS for each in objects_of(name, *WORKLOADS)}
    assert images == {f"sparkis:{sparkis.__version__}"}
    assert set(re.findall(r"\bsparkis:\d\S+", CONTAINERFILE)) <= {*images, "7379:7379"}
