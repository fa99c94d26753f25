"""Tests of the image of deploy/container: `make test-image` builds it, and runs them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.image.image import IMAGE

HERE = Path(__file__).parent
IS_BUILT = os.getuid() == 0 and (IMAGE / "image.json").exists()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests where there is no image."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(
                pytest.mark.expected_skip(not IS_BUILT, reason="needs root, and what make test-image builds")
            )
