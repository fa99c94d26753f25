"""Addresses as text: host:port, with brackets around an IPv6 host."""

from __future__ import annotations

PORT_MAX = 65_535


def address_of(host: str, port: int) -> str:
    """Return an address as text."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_and_port(address: str) -> tuple[str, int]:
    """Parse an address; the host is returned without brackets. ValueError if it is malformed."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or not 0 < int(port) <= PORT_MAX:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host, int(port)
