"""The workflows and forms of .github/: they can be parsed, and name what there is.

`make check` validates them against the schemas of GitHub.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FILES = sorted(path.relative_to(GITHUB).as_posix() for path in GITHUB.glob("**/*.yml"))


def load(name: str) -> dict[Any, Any]:
    found = yaml.safe_load((GITHUB / name).read_text())
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("name", FILES)
def test_file_can_be_parsed_and_has_no_key_twice(name: str) -> None:
    class Unique(yaml.SafeLoader):
        pass

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
        keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"{name}: a key is there twice: {keys}"
        return dict(loader.construct_mapping(node, deep=True))

    Unique.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    assert yaml.load((GITHUB / name).read_text(), Unique)


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("workflows/")])
def test_workflow_runs_targets_of_make_with_few_rights_and_in_bounded_time(name: str) -> None:
    workflow = load(name)
    assert workflow["permissions"] == {"contents": "read"}
    targets = set(re.findall(r"^([a-z-]+):.*##", MAKEFILE, re.MULTILINE))
    for job in workflow["jobs"].values():
        assert 0 < job["timeout-minutes"] <= 120
        for step in job["steps"]:
            assert set(re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))) <= targets
            if "checkout" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False


def test_matrix_has_versions_that_project_names() -> None:
    jobs = load("workflows/ci.yml")["jobs"]
    named = [each.rpartition(" ")[2] for each in PROJECT["project"]["classifiers"]]
    assert jobs["test"]["strategy"]["matrix"]["python"] == [each for each in named if re.fullmatch(r"3\.\d+", each)]
    spark = re.search(r"^SPARK_VERSIONS \?= (.*)$", MAKEFILE, re.MULTILINE)
    assert spark is not None and jobs["spark"]["strategy"]["matrix"]["spark"] == spark[1].split()


def test_hosted_machines_run_all_that_ci_runs() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    runs = [step.get("run", "") for job in load("workflows/ci.yml")["jobs"].values() for step in job["steps"]]
    assert set(re.findall(r"^run ([a-z-]+)", script, re.MULTILINE)) <= set(
        re.findall(r"\bmake ([a-z-]+)", "\n".join(runs))
    )


def test_only_tag_publishes_and_without_secret() -> None:
    workflow = load("workflows/release.yml")
    # YAML 1.1 reads `on` as true.
    assert workflow[True] == {"push": {"tags": ["v*"]}}
    rights = {name: job.get("permissions") for name, job in workflow["jobs"].items()}
    assert rights == {"sdist": None, "wheels": None, "publish": {"id-token": "write"}}
    assert set(workflow["jobs"]["publish"]["needs"]) == set(rights) - {"publish"}
    assert "secrets." not in (GITHUB / "workflows" / "release.yml").read_text()


def test_links_of_forms_are_projects() -> None:
    urls = PROJECT["project"]["urls"]
    for each in load("ISSUE_TEMPLATE/config.yml")["contact_links"]:
        assert each["url"].startswith((urls["Repository"], urls["Documentation"]))
