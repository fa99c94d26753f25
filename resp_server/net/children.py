"""Child processes: they run the same Python and the same code as their parent."""

from __future__ import annotations

import os
import signal
from pathlib import Path

# Secrets are passed to child processes in these variables, never on a command line: the token of the project's own
# processes, the clients' password.
TOKEN_VARIABLE = "SPARKIS_CONTROL_TOKEN"
PASSWORD_VARIABLE = "SPARKIS_PASSWORD"
# The password with which proxies, and the other nodes of a cluster, authenticate.
SERVER_PASSWORD_VARIABLE = "SPARKIS_SERVER_PASSWORD"

# The signals that may end a process that maps a damaged file into memory.
CRASHES = {signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}

SOURCE = str(Path(__file__).resolve().parents[2])


def environment() -> dict[str, str]:
    """Return the environment of a child process: that of this process, with the folder of this code in PYTHONPATH."""
    paths = [SOURCE, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
