"""Tests of the units of deploy/systemd under a real systemd: `make test-systemd` makes the machine, and runs them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders import put_value, value_state, write_log
from tests.systemd.machine import IS_MADE, ROOT, Machine, booted

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests where there is no such machine."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(
                pytest.mark.expected_skip(not IS_MADE, reason="needs root, and what make test-systemd makes")
            )


def printed_commands() -> list[str]:
    """Return the commands of docs/deploy.md that install and start a server with systemd."""
    section = (ROOT / "docs" / "deploy.md").read_text().partition("\n## systemd\n")[2]
    block = section.split("```")[1]
    return [re.sub(r"\s+#.*", "", line.removeprefix("# ")) for line in block.strip().splitlines()]


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine on which a server was installed and started by the commands of docs/deploy.md."""
    log = tmp_path_factory.mktemp("machine") / "log"
    write_log(log, "job", [value_state("s")], [put_value("s", b"job:s:a", b"1")])
    for folder in (log.parent, log.parent.parent):
        os.chmod(folder, 0o755)
    pip, *others = printed_commands()
    assert pip.startswith("python3 -m venv /opt/sparkis")  # scripts/systemd.sh has done that
    with booted(log) as running:
        for command in others:
            if command.startswith("systemctl edit"):
                running.run("chown -R sparkis:sparkis /srv/sparkis/log; chmod -R g+rwX /srv/sparkis/log")
            else:
                running.run(command)
        yield running
