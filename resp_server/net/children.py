"""Child processes: they run the same Python and the same code as their parent."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from time import monotonic

from resp_server.net.service_manager import VARIABLES

# Secrets are passed to child processes in these variables, never on a command line: the token of the project's own
# processes, the clients' password.
TOKEN_VARIABLE = "SPARKIS_CONTROL_TOKEN"
PASSWORD_VARIABLE = "SPARKIS_PASSWORD"
# The password with which proxies, and the other nodes of a cluster, authenticate.
SERVER_PASSWORD_VARIABLE = "SPARKIS_SERVER_PASSWORD"

# The signals that may end a process that maps a damaged file into memory.
CRASHES = {signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}

SOURCE = str(Path(__file__).resolve().parents[2])

# A child process that ends is restarted after a pause that doubles up to a maximum (guesses).
RESTART_PAUSE_S = 0.1
RESTART_PAUSE_S_MAX = 5.0


class RestartPause:
    """The pause before the next restart of a child process; after a long run it is the shortest again."""

    def __init__(self) -> None:
        self._next_s = RESTART_PAUSE_S
        self._started_s = monotonic()

    def begin_run(self) -> None:
        """Record that the process starts now."""
        self._started_s = monotonic()

    def next_s(self) -> float:
        """Return the pause before the next start; the one after it is twice as long."""
        if monotonic() - self._started_s > RESTART_PAUSE_S_MAX:
            self._next_s = RESTART_PAUSE_S
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, RESTART_PAUSE_S_MAX)
        return pause_s


def environment() -> dict[str, str]:
    """Return the environment of a child process: that of this process, with the folder of this code in PYTHONPATH.

    Only this process tells systemd how the service is doing.
    """
    paths = [SOURCE, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return inherited | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
