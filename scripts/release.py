"""Build the source distribution and a wheel into dist/, check them, and install the wheel as a user does.

    python scripts/release.py [--tag v1.2.3] [--extras none,rocksdb] [--keep]

`make release` runs it with the packages of the dependency group `release`. The steps:

1. The tree is clean, or --dirty is given; the version, the tag and the change log agree.
2. `build` makes dist/sparkis-VERSION.tar.gz, and from that the wheel.
3. `twine check --strict`; every shipped module is in the wheel, nothing else is.
4. For no extra and for each extra, an empty environment gets the wheel, and the newest packages that it allows. There
   `sparkis` is imported, `sparkis --version` printed, all packages of the extra imported, a tiny log served and read.

Wheels that PyPI takes are built by cibuildwheel (.github/workflows/release.yml); the one here fits this machine.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
SMOKE = Path(__file__).with_name("release_smoke.py")
PACKAGES = ("sparkis", "state_backend", "resp_server", "spark_hooks", "sparkis_ui")
# It is compiled by `make`, from its source.
WRITER = "spark_hooks/real_time/sparkis-writer.jar"
# Not for users.
NOT_INSTALLED = ("dev",)
NO_EXTRA = "none"


class ReleaseError(Exception):
    """Something is wrong with the release; the text says what."""


def main() -> int:
    """Run all steps; return the exit code."""
    options = parse()
    try:
        check_tree(options)
        version = version_of(options.tag)
        sdist, wheel = build(version)
        check_files(sdist, wheel, version)
        smoke(wheel, options.extras, keep=options.keep)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    print(f"release: {sdist.name} and {wheel.name} are in dist/")
    return 0


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="make release", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tag", help="the tag of the release: it and the change log must name the version")
    parser.add_argument("--extras", help=f"only these extras, by comma; {NO_EXTRA}: the wheel alone (default: all)")
    parser.add_argument("--dirty", action="store_true", help="build a tree with changes that are not committed")
    parser.add_argument("--keep", action="store_true", help="keep the environments of the smoke tests")
    return parser.parse_args()


def check_tree(options: argparse.Namespace) -> None:
    """Raise ReleaseError if the tree differs from its commit: then nobody could build the same again."""
    changed = output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    if changed and not options.dirty:
        raise ReleaseError(f"the tree has changes; commit them, or say --dirty:\n{changed}")


def version_of(tag: str | None) -> str:
    """Return the version; ReleaseError if it is not ready for the tag: another version, no date, no golden folder."""
    found = re.search(r'^VERSION = "(.*)"$', (ROOT / "state_backend" / "__init__.py").read_text(), re.MULTILINE)
    newest = re.search(r"^## (\S+) \((.*)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if found is None or newest is None:
        raise ReleaseError("state_backend/__init__.py has no VERSION, or CHANGELOG.md no heading `## VERSION (DATE)`")
    if newest[1] != found[1]:
        raise ReleaseError(f"CHANGELOG.md begins with {newest[1]}, but the version is {found[1]}")
    if tag is not None and tag != f"v{found[1]}":
        raise ReleaseError(f"the tag is {tag}, but the version is {found[1]}")
    if tag is not None and not re.fullmatch(r"\d{4}-\d\d-\d\d", newest[2]):
        raise ReleaseError(f"CHANGELOG.md says ({newest[2]}) beside {newest[1]}; write the date of the release")
    golden = f"tests/golden/sparkis-{found[1]}.tar.xz"
    if tag is not None and not (ROOT / golden).exists():
        raise ReleaseError(f"{golden} is missing; write it with scripts/golden_release.py, and commit it")
    return found[1]


def build(version: str) -> tuple[Path, Path]:
    """Build the source distribution, and the wheel from it; return both files."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT))
    (sdist,), (wheel,) = DIST.glob(f"sparkis-{version}.tar.gz"), DIST.glob(f"sparkis-{version}-*.whl")
    return sdist, wheel


def check_files(sdist: Path, wheel: Path, version: str) -> None:
    """Raise ReleaseError if the metadata, or the list of files, is wrong."""
    run(sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel))
    sources = {path.relative_to(ROOT).as_posix() for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    with tarfile.open(sdist) as packed:
        inside = {name.partition("/")[2] for name in packed.getnames()}
    for file, found in ((wheel, names), (sdist, inside)):
        if missing := sorted(sources - found):
            raise ReleaseError(f"{file.name} lacks {', '.join(missing)}")
    foreign = {name.partition("/")[0] for name in names} - {*PACKAGES, f"sparkis-{version}.dist-info"}
    if foreign:
        raise ReleaseError(f"{wheel.name} has {', '.join(sorted(foreign))}, which is not shipped")
    if not any(name.startswith("resp_server/native/fast_path.") and name.endswith(".so") for name in names):
        raise ReleaseError(f"{wheel.name} lacks the compiled core: is there a C compiler, and are Python's headers?")
    if WRITER not in names:
        raise ReleaseError(f"{wheel.name} lacks {WRITER}: scripts/writer_jar.py says why it cannot be compiled")
    metadata = metadata_of(wheel)
    if metadata["Version"] != version:
        raise ReleaseError(f"{wheel.name} says Version: {metadata['Version']}")


def metadata_of(wheel: Path) -> Message:
    """Return a wheel's metadata."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(name).decode())


def smoke(wheel: Path, chosen: str | None, *, keep: bool) -> None:
    """Install and try the wheel without extras, and with each; ReleaseError names those that failed."""
    extras = [
        NO_EXTRA,
        *(each for each in metadata_of(wheel).get_all("Provides-Extra", []) if each not in NOT_INSTALLED),
    ]
    if chosen is not None:
        if unknown := set(chosen.split(",")) - set(extras):
            raise ReleaseError(f"there is no extra {', '.join(sorted(unknown))}; there are {', '.join(extras)}")
        extras = [each for each in extras if each in chosen.split(",")]
    failed = [extra for extra in extras if not tried(wheel, extra, keep=keep)]
    if failed:
        raise ReleaseError(f"the wheel does not work with: {', '.join(failed)}")


def tried(wheel: Path, extra: str, *, keep: bool) -> bool:
    """Install the wheel with an extra into an empty environment, and try it; return whether it works."""
    began_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix=f"sparkis-release-{extra}-"))
    python = folder / "venv" / "bin" / "python"
    wanted = str(wheel) if extra == NO_EXTRA else f"{wheel}[{extra}]"
    try:
        run(sys.executable, "-m", "venv", str(folder / "venv"))
        run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", wanted)
        run(str(python), "-m", "pip", "check", "--disable-pip-version-check")
        run(str(python), "-I", str(SMOKE), extra, cwd=folder)
    except ReleaseError as error:
        print(f"release: {extra}: {error}", file=sys.stderr)
        return False
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"release: {extra}: works ({time.monotonic() - began_s:.0f} s)", flush=True)
    return True


def environment() -> dict[str, str]:
    """Return the environment of commands: without this checkout, and without settings of its environment."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "SPARKIS_PURE", "SPARK_HOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in dropped}


def run(*command: str, cwd: Path | None = None) -> None:
    """Run a command; ReleaseError with its output if it fails."""
    output(*command, cwd=cwd)


def output(*command: str, cwd: Path | None = None) -> str:
    """Return what a command prints; ReleaseError with all of its output if it fails."""
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=environment(), check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise ReleaseError(f"{_named(command)} failed with code {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _named(command: Sequence[str]) -> str:
    return " ".join([Path(command[0]).name, *command[1:]])


if __name__ == "__main__":
    sys.exit(main())
