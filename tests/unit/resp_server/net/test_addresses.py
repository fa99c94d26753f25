"""Written addresses, and what they are made of."""

from __future__ import annotations

import pytest

from resp_server.net.addresses import address_of, host_and_port


@pytest.mark.parametrize(
    ("host", "port", "address"),
    [("10.0.0.1", 7377, "10.0.0.1:7377"), ("driver", 1, "driver:1"), ("fe80::1", 65_535, "[fe80::1]:65535")],
)
def test_address_is_written_and_read(host: str, port: int, address: str) -> None:
    assert address_of(host, port) == address
    assert host_and_port(address) == (host, port)


@pytest.mark.parametrize(
    "address",
    [
        *("", "driver", ":7377", "[]:7377", "driver:", "driver:x", "driver:0", "driver:65536", "driver:" + "9" * 5000),
        *("redis://driver:1", "driver:1:2", "[driver]:1", "[::1:7377", "::1]:7377", "[[::1]]:7377", "[::1]", "u@h:1"),
    ],
)
def test_invalid_address_is_refused_as_written(address: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT") as refused:
        host_and_port(address)
    assert repr(address) in str(refused.value)


@pytest.mark.parametrize("address", ["::1:8330", "fe80::1:7377", "2001:db8::12", "2001:db8:0:0:0:0:0:1:8330", "::"])
def test_ipv6_address_without_brackets_is_refused_with_correct_form(address: str) -> None:
    """`::1:8330` is port 8330 of ::1, or all of an address."""
    with pytest.raises(ValueError, match=r"an IPv6 address is in brackets: \[::1\]:6379"):
        host_and_port(address)
