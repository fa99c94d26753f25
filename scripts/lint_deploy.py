"""Lint what others run: the image's file and the manifests of deploy/, and the workflows and forms of .github/.

    python scripts/lint_deploy.py

It needs the dependency group `deploy`, and no network: the linters' packages contain the schemas. `make check` runs it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = Path(sys.executable).parent
# The oldest and the newest version of Kubernetes whose schemas the manifests must fit.
KUBERNETES = ("1.30.0", "1.37.0")


def commands() -> list[list[str]]:
    """Return the command lines of the linters."""
    container = [str(path) for path in ROOT.glob("deploy/container/Containerfile")]
    manifests = [str(path) for path in sorted(ROOT.glob("deploy/kubernetes/*.yaml"))]
    workflows = [str(path) for path in sorted(ROOT.glob(".github/workflows/*.yml"))]
    forms = [str(path) for path in sorted(ROOT.glob(".github/ISSUE_TEMPLATE/[!c]*.yml"))]
    config = [str(ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml")]
    validate = ["kubernetes-validate", "--strict", "--quiet"]
    schema = ["check-jsonschema", "--quiet", "--builtin-schema"]
    return [
        ["hadolint", *container],
        *([*validate, "--kubernetes-version", version, *manifests] for version in KUBERNETES),
        [*schema, "vendor.github-workflows", *workflows],
        [*schema, "vendor.github-issue-forms", *forms],
        [*schema, "vendor.github-issue-config", *config],
        ["zizmor", "--offline", "--quiet", "--no-progress", *workflows],
    ]


def main() -> int:
    """Run all linters; return 1 if one found something."""
    failed = [
        program
        for program, *arguments in commands()
        if subprocess.run([PROGRAMS / program, *arguments], cwd=ROOT, check=False).returncode
    ]
    if failed:
        print(f"lint_deploy: {', '.join(dict.fromkeys(failed))} found something", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
