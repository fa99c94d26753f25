"""An S3 server for all tests of this folder, a proxy that fails on demand, and a log per test.

With `--store azure` (`make test-azure`) it is a server of Azure's blobs. Tests of S3's own requests are marked `s3`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from compat.object_store import azurite, faulty_proxy, s3_server
from compat.object_store.faulty_proxy import FaultyProxy
from state_backend.log.change_log import check_writable
from state_backend.log.filesystems import Filesystem, open_filesystem

BUCKET = "sparkis-tests"


SERVERS = {"s3": s3_server, "azure": azurite}
SCHEMES = {"s3": "s3", "azure": "az"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that chooses the server."""
    parser.addoption("--store", choices=sorted(SERVERS), default="s3", help="the protocol of the object store")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of S3's own requests at another store."""
    if config.getoption("--store", "s3") != "s3":
        left_out = [item for item in items if item.get_closest_marker("s3")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def store(pytestconfig: pytest.Config) -> str:
    """The name of the protocol."""
    return str(pytestconfig.getoption("--store", "s3"))


@pytest.fixture(scope="session")
def store_port(store: str) -> Iterator[int]:
    """The port of a server."""
    with SERVERS[store].running(BUCKET) as port:
        yield port


@pytest.fixture
def proxy(store: str, store_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy before the server, which this process and its children use."""
    with faulty_proxy.running(store_port) as proxy:
        for name, value in SERVERS[store].environment(proxy.port).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("AWS_PROFILE", raising=False)
        yield proxy
        proxy.heal()


@pytest.fixture
def own_folder(store: str, proxy: FaultyProxy) -> str:
    """The address of a test's own folder in the bucket."""
    return f"{SCHEMES[store]}://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
def root(own_folder: str) -> str:
    """The address of a test's own log; it has been accessed once, so that tests count only their own requests."""
    address = f"{own_folder}/log"
    check_writable(address)
    return address


@pytest.fixture
def filesystem(root: str) -> Filesystem:
    """That log's filesystem."""
    return open_filesystem(root)
