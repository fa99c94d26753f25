"""Where commands keep files of the user by default."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """Return the folder of files that stay between runs, by the XDG base directory specification."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state", "sparkis")
