"""etcd, the API server and controller manager of Kubernetes, which `make test-kubernetes` builds. There is no node."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from compat.conformance.servers import free_port
from compat.processes import killed_at_end
from compat.waiting import eventually

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "build" / "kubernetes" / "bin"
TOKEN = "of-the-test"
# An API server starts in seconds, but may share its processors with much else.
START_S_MAX = 180.0


class ApiServer:
    """A running API server, to which `kubectl` is the client."""

    def __init__(self, url: str) -> None:
        self._connected = ["--server", url, "--insecure-skip-tls-verify", "--token", TOKEN]

    def kubectl(self, *words: object, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run kubectl; return what it printed."""
        command = [PROGRAMS / "kubectl", *self._connected, *map(str, words)]
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False)

    def objects(self, kind: str, namespace: str) -> list[dict[str, Any]]:
        """Return the objects of a kind."""
        done = self.kubectl("get", kind, "--namespace", namespace, "--output", "json")
        return list(json.loads(done.stdout)["items"])

    def is_ready(self) -> bool:
        return self.kubectl("get", "--raw", "/readyz").stdout == "ok"


@contextmanager
def running(folder: Path) -> Iterator[ApiServer]:
    """Start etcd, an API server and a controller manager on loopback; end them with the block."""
    store, peers, port, controllers = (free_port() for _ in range(4))
    key, tokens, config = folder / "key", folder / "tokens", folder / "config"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    tokens.write_text(f"{TOKEN},admin,admin,system:masters\n")
    url = f"https://127.0.0.1:{port}"
    config.write_text(
        json.dumps(
            {
                "clusters": [{"name": "test", "cluster": {"server": url, "insecure-skip-tls-verify": True}}],
                "users": [{"name": "test", "user": {"token": TOKEN}}],
                "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
                "current-context": "test",
            }
        )
    )
    own, peer = f"http://127.0.0.1:{store}", f"http://127.0.0.1:{peers}"
    etcd = [
        *("--data-dir", folder / "etcd", "--listen-client-urls", own, "--advertise-client-urls", own),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"),
    ]
    api = [
        *("--etcd-servers", own, "--bind-address", "127.0.0.1", "--secure-port", port, "--token-auth-file", tokens),
        *(
            "--cert-dir",
            folder / "certificates",
            "--authorization-mode",
            "RBAC",
            "--service-cluster-ip-range",
            "10.0.0.0/24",
        ),
        *("--service-account-key-file", key, "--service-account-signing-key-file", key),
        *("--service-account-issuer", "https://kubernetes.default.svc"),
    ]
    manager = [
        *("--kubeconfig", config, "--bind-address", "127.0.0.1", "--secure-port", controllers, "--leader-elect=false"),
        *("--cert-dir", folder / "certificates", "--service-account-private-key-file", key),
    ]
    programs = {"etcd": etcd, "kube-apiserver": api, "kube-controller-manager": manager}
    with ExitStack() as stack:
        processes = []
        for program, words in programs.items():
            output = stack.enter_context((folder / f"{program}.log").open("wb"))
            command = [str(PROGRAMS / program), *map(str, words)]
            processes.append(stack.enter_context(killed_at_end(command, stdout=output, stderr=output)))
            if program == "kube-apiserver":
                server = ApiServer(url)
                eventually(
                    server.is_ready, awaited="the API server is ready", processes=processes, timeout_s=START_S_MAX
                )
        yield server
