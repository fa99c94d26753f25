"""Addresses as text: host:port, with brackets around an IPv6 host."""

from __future__ import annotations

from ipaddress import AddressValueError, IPv6Address

PORT_MAX = 65_535


def address_of(host: str, port: int) -> str:
    """Return an address as text."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_and_port(address: str, port_min: int = 1) -> tuple[str, int]:
    """Parse an address; the host is returned without brackets. ValueError if it is malformed.

    The host of an IPv6 address without brackets is refused: `::1:8330` is also a whole address.
    """
    host, _, port = address.rpartition(":")
    in_brackets = host[1:-1] if host.startswith("[") and host.endswith("]") else ""
    if not in_brackets and (is_ipv6(host) or is_ipv6(address)):
        raise ValueError(f"{address!r} is not HOST:PORT; an IPv6 address is in brackets: [::1]:6379")
    is_host = is_ipv6(in_brackets) if in_brackets else bool(host) and not set(host) & set(":[]/@")
    if not is_host or not is_port(port, port_min):
        raise ValueError(f"{address!r} is not HOST:PORT")
    return in_brackets or host, int(port)


def is_port(text: str, port_min: int = 1) -> bool:
    """Return whether a text is the number of a port."""
    return text.isascii() and text.isdecimal() and len(text) <= 5 and port_min <= int(text) <= PORT_MAX


def is_ipv6(host: str) -> bool:
    """Return whether a host is an IPv6 address, with or without a zone (`fe80::1%eth0`)."""
    try:
        IPv6Address(host)
    except AddressValueError:
        return False
    return True
