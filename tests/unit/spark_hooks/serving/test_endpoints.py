"""The address of a control listener, as it is written for another process."""

from __future__ import annotations

from pathlib import Path

import pytest

from resp_server.net.tls import TlsFiles
from spark_hooks.serving.endpoints import ControlAddress, url_of


@pytest.mark.parametrize("tls", [None, TlsFiles("a.crt", "a.key", "ca.crt", "no")])
def test_address_is_read_as_it_was_written(tmp_path: Path, tls: TlsFiles | None):
    address = ControlAddress(7000, "a token", "10.0.0.1", tls)
    address.write(tmp_path / "address.json")
    assert ControlAddress.read(tmp_path / "address.json") == address


def test_scheme_of_url_chooses_tls():
    assert url_of("10.0.0.1", 7000, None) == "redis://10.0.0.1:7000"
    assert url_of("::1", 7000, "s/t", TlsFiles("a.crt", "a.key")) == "rediss://:s%2Ft@[::1]:7000"
