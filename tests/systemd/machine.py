"""A machine with a real systemd: `systemd-nspawn` boots the Debian that `make test-systemd` has made."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compat.waiting import eventually
from tests.systemd.nspawn import START_S_MAX, Container, started

ROOT = Path(__file__).parents[2]
DEBIAN = ROOT / "build" / "debian"
INSTALLED = ROOT / "build" / "systemd" / "sparkis"
# `make test-systemd` has not made the machine where it does not run as root.
IS_MADE = os.getuid() == 0 and shutil.which("systemd-nspawn") is not None and (INSTALLED / ".ready").exists()


class Machine(Container):
    """A booted machine. What is written in it is gone at its end.

    Its folder /srv/sparkis/log is a folder of this machine, and /source has the checkout's deploy/.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        super().__init__(process)
        eventually(
            lambda: self._state() in ("running", "degraded"),
            processes=[process],
            awaited="the machine has booted",
            timeout_s=START_S_MAX,
        )

    def _state(self) -> str:
        return self.run("systemctl is-system-running || true").strip()

    def run(self, command: str) -> str:
        """Run a command of a shell as root, beside deploy/; return its output. AssertionError if it fails."""
        return super().run(f"cd /source; {command}")

    def property(self, unit: str, name: str) -> str:
        """Return a property of a unit, such as MainPID or ActiveState."""
        return self.run(f"systemctl show --value --property {name} {unit}").strip()

    def set_up(self, unit: str, *settings: str) -> None:
        """Write a drop-in of a unit, as `systemctl edit` does; without settings remove it."""
        folder = f"/etc/systemd/system/{unit}.d"
        lines = "\n".join(["[Service]", *settings])
        self.run(f"rm -rf {folder}; mkdir {folder}; echo '{lines}' >{folder}/test.conf; systemctl daemon-reload")

    def event_loop_of(self, unit: str) -> int:
        """Return the id of the process that answers clients, the first child of the unit's supervisor."""
        main = self.property(unit, "MainPID")
        return int(self.run(f"cat /proc/{main}/task/{main}/children").split()[0])


@contextmanager
def booted(log: Path) -> Iterator[Machine]:
    """Boot a machine whose change log is in a folder of this one, and stop it at the end."""
    words = [
        *("--boot", f"--directory={DEBIAN}", "--volatile=overlay", "--machine=sparkis", "--link-journal=no"),
        *(f"--bind-ro={INSTALLED}:/opt/sparkis", f"--bind-ro={ROOT / 'deploy'}:/source/deploy"),
        f"--bind={log}:/srv/sparkis/log",
    ]
    with started(words, log.with_name("console")) as process:
        yield Machine(process)
