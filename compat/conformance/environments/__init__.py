"""Package environments, each for one client's script; their packages precede those of the running Python.

A file `<name>.txt` beside this one has the versions. They are installed once, into a folder that git ignores, and again
when the file changes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# Outside the folders that the checks read.
INSTALLED = HERE.parents[2] / ".clients"


def prepared(name: str) -> Path:
    """Return the folder with the packages of an environment; missing packages are installed."""
    versions = (HERE / f"{name}.txt").read_text(encoding="utf-8")
    folder = INSTALLED / f"{name}-{sys.implementation.cache_tag}"
    ready = folder / ".ready"
    if ready.exists() and ready.read_text(encoding="utf-8") == versions:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    print(f"installing {', '.join(versions.split())} for {name}", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    subprocess.run([*command, "--target", str(folder), "-r", str(HERE / f"{name}.txt")], check=True)
    ready.write_text(versions, encoding="utf-8")
    return folder
