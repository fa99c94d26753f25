"""Print the locked requirements: what pip chooses today for all the extras of pyproject.toml.

Versions only: no index, no file address, no hash. Run it on the oldest Python that the project supports; a
newer one needs a subset, and pip takes what a platform needs beyond it within the bounds of pyproject.toml.
"""

import json
import platform
import subprocess
import sys


def main() -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    report = subprocess.run(
        [*command, "--dry-run", "--ignore-installed", "--report", "-", ".[dev]"],
        check=True,
        stdout=subprocess.PIPE,
    ).stdout
    packages = (item["metadata"] for item in json.loads(report)["install"])
    lines = [f"{package['name'].lower()}=={package['version']}" for package in packages]
    print(f"# Written by `make lock` with Python {platform.python_version()}; do not edit.")
    print(*sorted(line for line in lines if not line.startswith("sparkis==")), sep="\n")


if __name__ == "__main__":
    main()
