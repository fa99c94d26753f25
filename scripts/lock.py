"""Print locked requirements: the versions that pip chooses today.

    python scripts/lock.py           for the project and its tests
    python scripts/lock.py docs      for a dependency group

The output has versions only, without an index, URLs or hashes. Run it on the oldest Python that the project supports: a
newer one needs a subset of these packages. Where a platform needs another package, pip chooses its version within the
bounds of pyproject.toml.
"""

import json
import platform
import subprocess
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def main(groups: list[str]) -> None:
    by_group = tomllib.loads(PROJECT.read_text())["dependency-groups"]
    requirements = [each for group in groups for each in by_group[group]] or [".[dev]"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    report = subprocess.run(
        [*command, "--dry-run", "--ignore-installed", "--report", "-", *requirements],
        check=True,
        stdout=subprocess.PIPE,
    ).stdout
    packages = (item["metadata"] for item in json.loads(report)["install"])
    lines = [f"{package['name'].lower()}=={package['version']}" for package in packages]
    print(f"# Written by `make lock` with Python {platform.python_version()}; do not edit.")
    print(*sorted(line for line in lines if not line.startswith("sparkis==")), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
