"""Child processes: they run the same Python and the same code as their parent."""

from __future__ import annotations

import os
import signal
from pathlib import Path

# Secrets are passed in these variables, never on a command line: the token of our processes, the clients' password.
TOKEN_VARIABLE = "SPARKIS_CONTROL_TOKEN"
PASSWORD_VARIABLE = "SPARKIS_PASSWORD"
# The password of proxies and of other nodes of a cluster.
UPSTREAM_PASSWORD_VARIABLE = "SPARKIS_UPSTREAM_PASSWORD"

# The signals that end a process that maps a damaged file.
CRASHES = {signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}

SOURCE = str(Path(__file__).resolve().parent.parent)


def environment() -> dict[str, str]:
    """Return the environment for a child: this process' own, with the folder of this code in PYTHONPATH."""
    paths = [SOURCE, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
