"""Tests of deploy/kubernetes with a real API server: `make test-kubernetes` builds it, and runs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes.api_server import PROGRAMS, ApiServer, running

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests where there is no API server."""
    for item in items:
        if item.path.parent == HERE:
            is_built = (PROGRAMS / "kubectl").exists()
            item.add_marker(pytest.mark.expected_skip(not is_built, reason="needs Go, which builds the API server"))


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server, which the tests share; each has its own namespace."""
    with running(tmp_path_factory.mktemp("kubernetes")) as server:
        yield server
