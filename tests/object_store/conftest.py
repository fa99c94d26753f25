"""A real S3 server for all tests of this folder, a proxy that fails on demand, and a log per test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from compat.object_store import faulty_proxy, s3_server
from compat.object_store.faulty_proxy import FaultyProxy
from state_backend.log.change_log import check_writable
from state_backend.log.filesystems import Filesystem, open_filesystem

BUCKET = "sparkis-tests"


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """The port of an S3 server."""
    with s3_server.running(BUCKET) as port:
        yield port


@pytest.fixture
def proxy(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy before the server, which this process and its children use."""
    with faulty_proxy.running(s3_port) as proxy:
        for name, value in s3_server.environment(proxy.port).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("AWS_PROFILE", raising=False)
        yield proxy
        proxy.heal()


@pytest.fixture
def root(proxy: FaultyProxy) -> str:
    """The address of a test's own log; it has been accessed once, so that tests count only their own requests."""
    address = f"s3://{BUCKET}/{uuid.uuid4().hex}/log"
    check_writable(address)
    return address


@pytest.fixture
def filesystem(root: str) -> Filesystem:
    """That log's filesystem."""
    return open_filesystem(root)
