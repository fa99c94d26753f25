"""The manifests: the API server takes all their objects, and the strictest Pod Security Standard their pods."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import yaml

from compat.waiting import eventually
from tests.kubernetes.api_server import ROOT, START_S_MAX, ApiServer

FOLDER = ROOT / "deploy" / "kubernetes"
MANIFESTS = sorted(path.name for path in FOLDER.glob("*.yaml"))
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"


@pytest.fixture
def namespace(api_server: ApiServer, request: pytest.FixtureRequest) -> str:
    """A namespace whose pods must fit the restricted standard."""
    name = f"test-{abs(hash(request.node.name))}"
    for words in (("create", "namespace", name), ("label", "namespace", name, RESTRICTED)):
        done = api_server.kubectl(*words)
        assert done.returncode == 0, done.stderr
    return name


def replicas_of(manifest: Path) -> Counter[str]:
    """Return how many pods each component of a manifest has."""
    found: Counter[str] = Counter()
    for each in yaml.safe_load_all(manifest.read_text()):
        if each["kind"] in ("Deployment", "StatefulSet"):
            found[each["metadata"]["labels"]["app.kubernetes.io/component"]] += each["spec"]["replicas"]
    return found


@pytest.mark.parametrize("name", MANIFESTS)
def test_api_server_takes_manifest_and_its_pods_are_admitted(api_server: ApiServer, namespace: str, name: str) -> None:
    objects = [each for each in yaml.safe_load_all((FOLDER / name).read_text()) if each]
    done = api_server.kubectl("apply", "--validate=strict", "--namespace", namespace, "--filename", FOLDER / name)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    assert [line.rpartition(" ")[2] for line in done.stdout.splitlines()] == ["created"] * len(objects)

    def pods() -> Counter[str]:
        labels = [each["metadata"]["labels"] for each in api_server.objects("pods", namespace)]
        return Counter(each["app.kubernetes.io/component"] for each in labels)

    eventually(pods, replicas_of(FOLDER / name).__eq__, awaited="all pods of the manifest", timeout_s=START_S_MAX)


def test_wrong_manifest_is_refused(api_server: ApiServer, namespace: str) -> None:
    wrong = (FOLDER / "serve.yaml").read_text().replace("periodSeconds: 2", "periodSeconds: -2")
    done = api_server.kubectl("apply", "--namespace", namespace, "--filename", "-", text=wrong)
    assert done.returncode == 1 and "startupProbe.periodSeconds: Invalid value: -2" in done.stderr


def test_pod_with_more_rights_is_not_admitted(api_server: ApiServer, namespace: str) -> None:
    wrong = (
        (FOLDER / "serve.yaml").read_text().replace("allowPrivilegeEscalation: false", "allowPrivilegeEscalation: true")
    )
    done = api_server.kubectl("apply", "--namespace", namespace, "--filename", "-", text=wrong)
    assert "violate PodSecurity" in done.stderr
