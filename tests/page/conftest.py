"""A server whose jobs change all the time, its page, and a Chromium: one of each for a module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from compat.conformance.servers import Running, sparkis_server, wait_for_keys
from compat.page.browser import chromium, page_of
from compat.page.world import PLANES, Writer
from tests.page.site import Tab


@dataclass
class Site:
    """A page and its server."""

    url: str
    server: Running


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The page of a server whose jobs commit an epoch every half a second."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "log").mkdir()
    with Writer(folder / "log") as writer:
        writer.step()
        options = ("--notify-keyspace-events", "KEA")
        with sparkis_server(folder / "store", folder / "log", *options) as server:
            wait_for_keys(server, PLANES)
            with page_of(f"redis://127.0.0.1:{server.port}") as url:
                yield Site(url, server)


@pytest.fixture(scope="module")
def tab(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """A tab of a Chromium at the page."""
    with chromium(tmp_path_factory.mktemp("profile"), records_requests=True) as browser:
        yield Tab(browser, site.url)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an empty log."""
    (tmp_path / "log").mkdir()
    return tmp_path
