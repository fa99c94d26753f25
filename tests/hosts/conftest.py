"""Tests on hosts of their own: `make test-hosts` runs a selection, `make test-hosts ARGS=--whole` all faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.network import missing

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that chooses all faults."""
    parser.addoption("--whole", action="store_true", help="all faults, with a Spark job; writes docs/reliability.md")
    parser.addoption("--without-spark", action="store_true", help="with --whole: four servers, and no Spark job")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip these tests where no hosts can be made."""
    reason = missing() if "hosts" in config.option.markexpr else ""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.expected_skip(bool(reason), reason=reason))
