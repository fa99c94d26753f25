"""The programs' own environments: a virtual environment for each list of Python packages, and one folder for npm.

The versions are locked: `requirements/<name>.txt` for PyPI, `javascript/package-lock.json` for npm. Environments are
made once, in a folder that git ignores, and again when the versions change. The project's own stays as it is.

npm's packages do not contain their tests. These come from the packages' repositories, by the tag of a version, with the
packages that the repository's own `package-lock.json` names. Without access to GitHub, name a mirror to git:
`git config --global url.file:///mirror/.insteadOf https://github.com/`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
INSTALLED = HERE.parents[1] / ".clients"
JAVASCRIPT = HERE / "javascript"
NPM_OPTIONS = ("--no-audit", "--no-fund", "--ignore-scripts", "--no-update-notifier", "--loglevel=error")


def python_of(name: str) -> Path:
    """Return the Python of an environment, which is made if it is missing or has other versions."""
    wanted = _requirements(name).read_text(encoding="utf-8")
    folder = INSTALLED / f"programs-{name}-{sys.implementation.cache_tag}"
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not _is_ready(ready, wanted):
        shutil.rmtree(folder, ignore_errors=True)
        print(f"installing the Python packages of {name}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
        subprocess.run([*install, "--no-deps", "-r", str(_requirements(name))], check=True)
        ready.write_text(wanted, encoding="utf-8")
    return python


def source_of(package: str, name: str) -> Path:
    """Return the folder with the source distribution of an environment's package, which contains its tests."""
    version = python_version(package, name)
    folder = INSTALLED / f"source-{package}-{version}"
    if not folder.exists():
        fetched = folder.with_suffix(".new")
        shutil.rmtree(fetched, ignore_errors=True)
        pip = [str(python_of(name)), "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
        given = ["--no-deps", "--no-binary", package, "--dest", str(fetched), f"{package}=={version}"]
        subprocess.run([*pip, *given], check=True)
        (archive,) = fetched.glob("*.tar.gz")
        shutil.unpack_archive(archive, fetched, filter="data")
        (fetched / archive.name.removesuffix(".tar.gz")).rename(folder)
        shutil.rmtree(fetched)
    return folder


def modules_of_npm() -> Path:
    """Return the folder with npm's packages, which are installed if they are missing or have other versions."""
    wanted = (JAVASCRIPT / "package-lock.json").read_text(encoding="utf-8")
    folder = INSTALLED / "programs-javascript"
    ready = folder / ".ready"
    if not _is_ready(ready, wanted):
        shutil.rmtree(folder, ignore_errors=True)
        print("installing the JavaScript packages", flush=True)
        folder.mkdir(parents=True)
        for name in ("package.json", "package-lock.json", ".npmrc"):
            shutil.copy(JAVASCRIPT / name, folder)
        subprocess.run(["npm", "ci", *NPM_OPTIONS], cwd=folder, check=True)
        ready.write_text(wanted, encoding="utf-8")
    return folder


def repository_of(address: str, tag: str, built: Sequence[str] = ()) -> Path:
    """Return the folder with a repository at a tag, and with its packages of npm. built: folders that tsc compiles."""
    folder = INSTALLED / f"repository-{address.rpartition('/')[2]}-{tag}"
    if not folder.exists():
        fetched = folder.with_suffix(".new")
        shutil.rmtree(fetched, ignore_errors=True)
        print(f"fetching {address} at {tag}, and installing its packages", flush=True)
        _clone(address, tag, fetched)
        subprocess.run(["npm", "ci", *NPM_OPTIONS], cwd=fetched, check=True)
        if built:
            subprocess.run(["npx", "tsc", "--build", *built], cwd=fetched, check=True)
        fetched.rename(folder)
    return folder


def _clone(address: str, tag: str, folder: Path) -> None:
    """Clone a repository at a tag, without its documentation: its files are not even fetched."""
    partial = ("--quiet", "--depth", "1", "--filter=blob:none", "--no-checkout", "--branch", tag)
    subprocess.run(["git", "clone", *partial, address, str(folder)], check=True)
    subprocess.run(["git", "sparse-checkout", "set", "--no-cone", "/*", "!/docs/"], cwd=folder, check=True)
    subprocess.run(["git", "checkout", "--quiet"], cwd=folder, check=True)


def python_version(package: str, name: str) -> str:
    """Return the locked version of a Python package."""
    for line in _requirements(name).read_text(encoding="utf-8").splitlines():
        found, _, version = line.partition("==")
        if found.lower() == package.lower():
            return version
    raise ValueError(f"{_requirements(name)} does not lock a version of {package}: add it")


def npm_version(package: str) -> str:
    """Return the locked version of a JavaScript package."""
    lock = json.loads((JAVASCRIPT / "package-lock.json").read_text(encoding="utf-8"))
    return str(lock["packages"][f"node_modules/{package}"]["version"])


def _requirements(name: str) -> Path:
    return HERE / "requirements" / f"{name}.txt"


def _is_ready(ready: Path, wanted: str) -> bool:
    return ready.exists() and ready.read_text(encoding="utf-8") == wanted
