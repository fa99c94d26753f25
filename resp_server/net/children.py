"""How a process of ours starts another one of ours: the same Python, and this very code."""

from __future__ import annotations

import os
import signal
from pathlib import Path

# Secrets go by these, never on a command line: between our own processes, and what clients must send.
TOKEN_VARIABLE = "SPARKIS_CONTROL_TOKEN"
PASSWORD_VARIABLE = "SPARKIS_PASSWORD"
# What proxies, and nodes of a cluster, give a server to be let in.
UPSTREAM_PASSWORD_VARIABLE = "SPARKIS_UPSTREAM_PASSWORD"

# The signals that end a process that maps a damaged file.
CRASHES = {signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}

SOURCE = str(Path(__file__).resolve().parent.parent)


def environment() -> dict[str, str]:
    """Return the environment for a child: this process's own, with the folder of this code to import from."""
    paths = [SOURCE, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
