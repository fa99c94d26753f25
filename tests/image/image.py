"""The image that `make test-image` has built, and podman, which runs it as docs/deploy.md does."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
IMAGE = REPOSITORY / "build" / "image"
ROOT = IMAGE / "root"
NAME, TAG = "sparkis-test", "localhost/sparkis:test"
PODMAN = [
    *("podman", "--root", str(IMAGE / "store"), "--runroot", str(IMAGE / "run")),
    *("--storage-driver", "overlay", "--cgroup-manager", "cgroupfs"),
]
# As for the build in `scripts/image.sh`: fewer open files and processes than podman asks for.
LIMITS = ["--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096"]
# crun refuses a machine that has both versions of cgroups; it needs only the first one.
NAMESPACES = "ip link set lo up; umount /sys/fs/cgroup/unified 2>/dev/null || :; echo ready; exec sleep infinity"
CLONE_NEWNET = 0x40000000
COMMAND_S_MAX = 300.0


def inspected() -> Mapping[str, Any]:
    """Return what `podman image inspect` says of the image."""
    (found,) = json.loads((IMAGE / "image.json").read_text())
    return dict(found)


def printed_command() -> list[str]:
    """Return the command of docs/deploy.md that runs the image."""
    page = (REPOSITORY / "docs" / "deploy.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith("$ podman run "))
    return shlex.split(line)[1:]


class Engine:
    """podman, with a network and mounts of its own, so that neither its bridge nor its mounts are the machine's."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def podman(self, *words: str, is_checked: bool = True, **variables: str) -> str:
        """Run a command of podman; return what it prints. AssertionError if it fails."""
        done = subprocess.run(
            ["nsenter", "--target", str(self._process.pid), "--mount", "--net", *PODMAN, *words],
            env=os.environ | {"NETAVARK_FW": "iptables"} | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S_MAX,
            check=False,
        )
        assert done.returncode == 0 or not is_checked, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    @contextmanager
    def network(self) -> Iterator[None]:
        """Make this thread's connections in the engine's network."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as own, open(f"/proc/{self._process.pid}/ns/net") as engines:
            assert libc.setns(engines.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            try:
                yield
            finally:
                assert libc.setns(own.fileno(), CLONE_NEWNET) == 0


@contextmanager
def engine() -> Iterator[Engine]:
    """Make podman's namespaces; remove its container and volume at the end of the block."""
    command = ["unshare", "--mount", "--net", "/bin/sh", "-euc", NAMESPACES]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        started = Engine(process)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield started
        finally:
            started.podman("rm", "--force", NAME, is_checked=False)
            started.podman("volume", "rm", "--force", "store", is_checked=False)
            process.kill()
