"""The pages of the site: every link works, every page is in the navigation, and missing files are reported."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sparkis
from scripts import pages, site_links

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SITE = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
PAGES_OF_SITE = {"README.md": "# Title\n## A `part` of it\n", "docs/tls.md": "# TLS\n"}


def listed(entries: list[dict[str, Any]]) -> Iterator[str]:
    for entry in entries:
        for target in entry.values():
            yield from listed(target) if isinstance(target, list) else [target]


def test_every_link_of_every_page_leads_somewhere(tmp_path: Path) -> None:
    pages.main(tmp_path)
    assert (tmp_path / "index.md").read_text().startswith("# sparkis\n")
    assert (tmp_path / "docs" / "plots" / "reads.svg").exists()


def test_navigation_has_every_page_once() -> None:
    assert sorted(listed(SITE["nav"])) == sorted(pages.page_of(source) for source, _ in pages.all_pages())


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "docs/internals.md"])
def test_pages_about_code_name_files_that_are_there(page: str) -> None:
    named = set(re.findall(r"[`\"]([\w/]+\.pyx?)[`\"]", (ROOT / page).read_text()))
    there = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("[!.]*/**/*.py*")]
    assert len(named) > 20
    assert [name for name in sorted(named) if not any(f"/{path}".endswith(f"/{name}") for path in there)] == []


def test_page_about_state_files_names_modules_that_are_there() -> None:
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \|", (ROOT / "docs" / "spark-state-files.md").read_text(), re.MULTILINE)
    named = re.findall(r"`([a-z_]+)`", " ".join(rows))
    assert len(named) > 10
    folder = ROOT / "state_backend" / "checkpoint"
    assert [name for name in named if not (folder / f"{name}.py").exists()] == []


# Names in the docstrings of packages that are not modules.
NOT_MODULES = {"sparkis.serve", "open_filesystem"}


@pytest.mark.parametrize("package", ["resp_server", "state_backend", "spark_hooks", "sparkis_ui"])
def test_docstrings_of_packages_name_existing_modules(package: str) -> None:
    missing = []
    for file in (ROOT / package).rglob("__init__.py"):
        folders = [file.parent, file.parent.parent, ROOT / package, ROOT]
        for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)`", ast.get_docstring(ast.parse(file.read_text())) or ""):
            path = name.replace(".", "/")
            if name in NOT_MODULES or (file.parent / name).exists():
                continue
            if not any([*folder.glob(f"{path}.py*"), *folder.glob(path)] for folder in folders):
                missing.append((file.relative_to(ROOT).as_posix(), name))
    assert missing == []


def test_site_and_package_name_same_addresses() -> None:
    assert SITE["repo_url"] == PROJECT["urls"]["Repository"]
    assert SITE["site_url"] == PROJECT["urls"]["Documentation"]


def test_page_about_api_has_every_public_name_once() -> None:
    shown = re.findall(r"^::: sparkis\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(sparkis.__all__)


@pytest.mark.parametrize(
    ("source", "written", "in_the_site"),
    [
        ("docs/tls.md", "[a](../README.md#a-part-of-it)", "[a](../index.md#a-part-of-it)"),
        ("README.md", "[a](docs/tls.md)", "[a](docs/tls.md)"),
        ("README.md", "[a](#title)", "[a](#title)"),
        ("README.md", "[a](setup.py)", f"[a]({PROJECT['urls']['Repository']}/blob/main/setup.py)"),
        ("docs/tls.md", "[a](design/)", f"[a]({PROJECT['urls']['Repository']}/tree/main/docs/design)"),
        ("docs/tls.md", "![a](plots/reads.svg)", "![a](plots/reads.svg)"),
        ("docs/tls.md", "[a](https://redis.io/docs)", "[a](https://redis.io/docs)"),
        ("docs/tls.md", "```\n[a](nothing)\n```", "```\n[a](nothing)\n```"),
        ("docs/tls.md", "| `x\\|y` | a\\|b | `z` |", "| `x|y` | a\\|b | `z` |"),
    ],
)
def test_links_work_from_folder_of_their_page(source: str, written: str, in_the_site: str) -> None:
    assert pages.for_site(source, written, PAGES_OF_SITE) == in_the_site


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("text\n[a](gone.md)", "docs/tls.md:2: there is no file gone.md"),
        ("[a](../README.md#gone)", "docs/tls.md:1: README.md has no heading #gone"),
        ("[a](#gone)", "docs/tls.md:1: docs/tls.md has no heading #gone"),
    ],
)
def test_link_that_leads_nowhere_is_named(written: str, said: str) -> None:
    with pytest.raises(pages.LinkError, match=f"^{re.escape(said)}$"):
        pages.for_site("docs/tls.md", written, PAGES_OF_SITE)


def test_links_of_built_site_are_followed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "index.html").write_text('<a href="a/#here">x</a> <a href="a/#gone">x</a> <a href="/s/a/">x</a>')
    (tmp_path / "a" / "index.html").write_text('<p id="here"></p><img src="../no.png"> <a href="https://b/c">x</a>')
    assert site_links.broken(tmp_path, "/s/") == [
        "a/index.html: ../no.png: the file does not exist",
        "index.html: a/#gone: the page has no such anchor",
    ]
