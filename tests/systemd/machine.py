"""A machine with a real systemd: `systemd-nspawn` boots the Debian that `make test-systemd` has made."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from compat.processes import children_of
from compat.waiting import eventually

ROOT = Path(__file__).parents[2]
DEBIAN = ROOT / "build" / "debian"
INSTALLED = ROOT / "build" / "systemd" / "sparkis"
CLONE_NEWNET = 0x40000000
# A machine boots in seconds, but may share its processors with much else.
BOOT_S_MAX = 180.0
COMMAND_S_MAX = 300.0
# `make test-systemd` has not made the machine where it does not run as root.
IS_MADE = os.getuid() == 0 and shutil.which("systemd-nspawn") is not None and (INSTALLED / ".ready").exists()


class Machine:
    """A booted machine with a network of its own. What is written in it is gone at its end.

    Its folder /srv/sparkis/log is a folder of this machine, and /source has the checkout's deploy/.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        eventually(self._leaders, processes=[process], awaited="the machine has a process 1", timeout_s=BOOT_S_MAX)
        (self._leader,) = self._leaders()
        eventually(
            lambda: self._state() in ("running", "degraded"), awaited="the machine has booted", timeout_s=BOOT_S_MAX
        )

    def _leaders(self) -> list[int]:
        """Return the child of nspawn that is process 1 of the machine, once it has become systemd."""
        found = []
        for each, words in children_of(self._process.pid).items():
            with suppress(OSError):  # nspawn's first child ends at once
                status = Path(f"/proc/{each}/status").read_text()
                if re.search(r"^NSpid:.*\t1$", status, re.MULTILINE) and b"nspawn" not in words:
                    found.append(each)
        return found

    def _state(self) -> str:
        return self.run("systemctl is-system-running || true").strip()

    def run(self, command: str) -> str:
        """Run a command of a shell as root, beside deploy/; return its output. AssertionError if it fails."""
        entering = ["nsenter", "--target", str(self._leader), "--mount", "--uts", "--ipc", "--net", "--pid"]
        done = subprocess.run(
            [*entering, "/bin/sh", "-euc", f"cd /source; {command}"],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S_MAX,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def property(self, unit: str, name: str) -> str:
        """Return a property of a unit, such as MainPID or ActiveState."""
        return self.run(f"systemctl show --value --property {name} {unit}").strip()

    def set_up(self, unit: str, *settings: str) -> None:
        """Write a drop-in of a unit, as `systemctl edit` does; without settings remove it."""
        folder = f"/etc/systemd/system/{unit}.d"
        lines = "\n".join(["[Service]", *settings])
        self.run(f"rm -rf {folder}; mkdir {folder}; echo '{lines}' >{folder}/test.conf; systemctl daemon-reload")

    @contextmanager
    def network(self) -> Iterator[None]:
        """Make this thread's connections, and those of threads that it starts, in the machine's network."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as own, open(f"/proc/{self._leader}/ns/net") as machines:
            assert libc.setns(machines.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            try:
                yield
            finally:
                assert libc.setns(own.fileno(), CLONE_NEWNET) == 0

    def event_loop_of(self, unit: str) -> int:
        """Return the id of the process that answers clients, the first child of the unit's supervisor."""
        main = self.property(unit, "MainPID")
        return int(self.run(f"cat /proc/{main}/task/{main}/children").split()[0])


@contextmanager
def booted(log: Path) -> Iterator[Machine]:
    """Boot a machine whose change log is in a folder of this one, and stop it at the end."""
    command = [
        *("systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--private-network", "--boot"),
        *(f"--directory={DEBIAN}", "--volatile=overlay", "--machine=sparkis", "--link-journal=no"),
        *(f"--bind-ro={INSTALLED}:/opt/sparkis", f"--bind-ro={ROOT / 'deploy'}:/source/deploy"),
        f"--bind={log}:/srv/sparkis/log",
    ]
    console = log.with_name("console").open("wb")
    with console, subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=console, stderr=console) as process:
        try:
            yield Machine(process)
        finally:
            process.terminate()  # nspawn has the machine shut down
            try:
                process.wait(BOOT_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
