"""Addresses as people and our own processes write them: host:port, with brackets around a host of IPv6."""

from __future__ import annotations

PORT_MAX = 65_535


def address_of(host: str, port: int) -> str:
    """Return an address as it is written."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_and_port(address: str) -> tuple[str, int]:
    """Return host and port of a written address, the host as sockets take it; ValueError."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or not 0 < int(port) <= PORT_MAX:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host, int(port)
