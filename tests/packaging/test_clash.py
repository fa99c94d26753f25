"""An environment in which another distribution took a package's name says so at once."""

from __future__ import annotations

import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

# The environment's own packages would stand in for those that are missing.
WITHOUT_SITE_PACKAGES = ("-S", "-c", "import sparkis")


@pytest.fixture
def installed(wheel: Path, stranger: Path, tmp_path: Path) -> Path:
    """A folder with sparkis as pip lays it out, to be damaged; in front of the environment's own."""
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path / "site")
    return tmp_path / "site"


def refusal(stranger: Path, *path: Path, command: tuple[str, ...] = ("-c", "import sparkis")) -> str:
    """Return the last line of what starting sparkis says; it has to fail."""
    done = subprocess.run(
        [str(stranger), *command],
        env={"PYTHONPATH": ":".join(map(str, path))},
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def install_other(site: Path, *, init: str = "") -> None:
    """Write what pip writes for another distribution with a package `resp_server`."""
    (site / "resp_server" / "__init__.py").write_text(init)
    info = site / "resp_server-0.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: resp-server\nVersion: 0.2.3\n")
    (info / "RECORD").write_text("resp_server/__init__.py,,\n")


def test_distribution_that_overwrote_package_is_named(stranger: Path, installed: Path) -> None:
    install_other(installed, init='"""A Redis-compatible server for testing."""\n')
    said = refusal(stranger, installed)
    assert "'resp_server'" in said
    assert str(installed / "resp_server" / "__init__.py") in said
    assert "pip uninstall resp-server" in said
    assert "pip install --force-reinstall --no-deps sparkis" in said


@pytest.mark.parametrize(
    "command",
    [
        ("-m", "sparkis", "--version"),
        ("-m", "resp_server.programs.serve", "--help"),
        ("-c", "import spark_hooks.publish.task"),
    ],
    ids=["command", "program", "worker"],
)
def test_commands_programs_and_workers_name_clash(stranger: Path, installed: Path, command: tuple[str, ...]) -> None:
    install_other(installed)
    assert "pip uninstall resp-server" in refusal(stranger, installed, command=command)


def test_clashing_package_that_cannot_be_imported_is_named(stranger: Path, installed: Path) -> None:
    install_other(installed, init="import a_module_that_is_not_there\n")
    said = refusal(stranger, installed)
    assert "a_module_that_is_not_there" in said
    assert "pip uninstall resp-server" in said


def test_folder_that_comes_first_on_path_is_named(stranger: Path, installed: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    (mine / "resp_server").mkdir(parents=True)
    (mine / "resp_server" / "__init__.py").write_text("")
    said = refusal(stranger, mine, installed)
    assert re.search(rf"{mine}/resp_server/__init__\.py .*PYTHONPATH", said)


def test_files_removed_with_another_distribution_are_named(stranger: Path, installed: Path) -> None:
    (installed / "resp_server" / "__init__.py").unlink()
    said = refusal(stranger, installed, command=WITHOUT_SITE_PACKAGES)
    assert str(installed / "resp_server") in said
    assert "pip install --force-reinstall --no-deps sparkis" in said


def test_missing_package_is_named(stranger: Path, installed: Path) -> None:
    shutil.rmtree(installed / "state_backend")
    said = refusal(stranger, installed, command=WITHOUT_SITE_PACKAGES)
    assert "its package 'state_backend' cannot be imported (ModuleNotFoundError" in said
