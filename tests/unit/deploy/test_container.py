"""The file of the image fits to the options of `sparkis`. `make check` lints it."""

from __future__ import annotations

import json
import re

from tests.unit.deploy.command_lines import CONTAINERFILE, ROOT, USER, options_of


def instruction(name: str) -> str:
    """Return the last such instruction of the image's file."""
    return re.findall(rf"^{name} (.*)$", CONTAINERFILE, re.MULTILINE)[-1]


def test_image_starts_server_with_options_that_exist() -> None:
    assert json.loads(instruction("ENTRYPOINT"))[-1] == "sparkis"
    options = options_of(json.loads(instruction("CMD")))
    assert options.bind == ["0.0.0.0"] and instruction("EXPOSE") == str(options.port)
    assert options.store.startswith(instruction("VOLUME"))


def test_image_runs_as_unprivileged_user_with_health_check() -> None:
    assert instruction("USER") == f"{USER}:{USER}" and f"--uid {USER}" in CONTAINERFILE
    words = json.loads(instruction("HEALTHCHECK").partition(" CMD ")[2])
    assert words[0] == "sparkis" and options_of(words[1:]).url == "redis://127.0.0.1:7379"


def test_image_has_every_package_and_no_compiler() -> None:
    _, build, runtime = CONTAINERFILE.split("\nFROM ")
    packages = [path.parent.name for path in ROOT.glob("*/py.typed")]
    assert set(packages) <= set(re.findall(r"^COPY (\w+) \1$", build, re.MULTILINE))
    assert "gcc" in build and "gcc" not in runtime


def test_image_copies_exactly_files_of_its_context() -> None:
    context = set(re.findall(r"^!(.+)$", (ROOT / ".containerignore").read_text(), re.MULTILINE))
    copied = {
        word for line in re.findall(r"^COPY (?!--from)(.+) \S+$", CONTAINERFILE, re.MULTILINE) for word in line.split()
    }
    assert copied == context
    assert [name for name in sorted(copied) if not (ROOT / name).exists()] == []
