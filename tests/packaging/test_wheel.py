"""What a release holds, and what PyPI shows of it."""

from __future__ import annotations

import re
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import sparkis

ROOT = Path(__file__).parents[2]
WRITER = ROOT / "spark_hooks" / "real_time" / "sparkis-writer.jar"
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="session")
def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as opened:
        return opened.namelist()


@pytest.fixture(scope="session")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (each for each in opened.namelist() if each.endswith(".dist-info/METADATA"))
        return Parser().parsestr(opened.read(name).decode())


def test_wheel_has_only_five_packages(names: list[str]) -> None:
    folders = {name.partition("/")[0] for name in names}
    assert {each for each in folders if not each.endswith(".dist-info")} == {
        "sparkis",
        "state_backend",
        "resp_server",
        "spark_hooks",
        "sparkis_ui",
    }


def test_sources_of_core_are_in_source_distribution_alone(sdist: Path, names: list[str]) -> None:
    with tarfile.open(sdist) as opened:
        of_source = {name.partition("/")[2] for name in opened.getnames()}
    folders = [ROOT / package for package in ("state_backend", "resp_server")]
    sources = {str(path.relative_to(ROOT)) for folder in folders for path in folder.rglob("*.p[yx][xd]")}
    assert len(sources) > 5
    assert sources <= of_source
    assert sources.isdisjoint(names)


@pytest.mark.parametrize("package", ["sparkis", "state_backend", "resp_server", "spark_hooks", "sparkis_ui"])
def test_each_package_has_py_typed(names: list[str], package: str) -> None:
    assert f"{package}/py.typed" in names


def test_every_module_of_checkout_is_in_it(names: list[str]) -> None:
    packages = ("sparkis", "state_backend", "resp_server", "spark_hooks", "sparkis_ui")
    modules = {str(path.relative_to(ROOT)) for package in packages for path in (ROOT / package).rglob("*.py")}
    assert modules <= set(names)


@pytest.mark.skipif(not WRITER.exists(), reason="make setup has found no Java compiler")
def test_compiled_writer_is_in_it_and_not_its_source(names: list[str]) -> None:
    assert [name for name in names if "parkis" in name and name.endswith((".jar", ".java"))] == [
        str(WRITER.relative_to(ROOT))
    ]


def test_page_has_its_templates_and_its_files(names: list[str]) -> None:
    folders = [ROOT / "sparkis_ui" / name for name in ("templates", "static")]
    files = {str(path.relative_to(ROOT)) for folder in folders for path in folder.iterdir()}
    assert len(files) > 10
    assert files <= set(names)


def test_metadata_has_version_of_package(metadata: Message) -> None:
    assert metadata["Version"] == sparkis.__version__


def test_wheel_needs_six_packages_and_spark_only_as_extra(metadata: Message) -> None:
    needed = [each for each in metadata.get_all("Requires-Dist", ()) if "extra ==" not in each]
    names = sorted(re.split(r"[^\w-]", each, maxsplit=1)[0] for each in needed)
    assert names == ["hiredis", "lmdb", "numpy", "pyarrow", "tomlkit", "uvloop"]


def test_metadata_is_complete(metadata: Message) -> None:
    urls = dict(each.split(", ", 1) for each in metadata.get_all("Project-URL", ()))
    assert set(urls) == {"Homepage", "Repository", "Documentation", "Changelog", "Issues"}
    assert metadata["Author"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    classifiers = set(metadata.get_all("Classifier", ()))
    for version in ("3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in classifiers


def test_readme_on_pypi_has_links_that_work_there(metadata: Message) -> None:
    assert metadata["Description-Content-Type"] == "text/markdown"
    readme = metadata.get_payload()
    assert isinstance(readme, str)
    links = LINK.findall(readme)
    files = f"{dict(each.split(', ', 1) for each in metadata.get_all('Project-URL', ()))['Repository']}/blob/"
    assert len([link for link in links if link.startswith(files)]) > 20
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    of_this_version = f"{files}v{sparkis.__version__}/"
    for link in links:
        if link.startswith(files):
            assert link.startswith(of_this_version)
            assert (ROOT / link.removeprefix(of_this_version).partition("#")[0]).exists(), link
