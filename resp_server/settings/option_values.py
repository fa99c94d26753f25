"""How the values of settings are written as options, and so in files and in the environment."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from ipaddress import ip_address
from typing import TYPE_CHECKING, NamedTuple

from resp_server.acl.rate_limits import RateLimit
from resp_server.net.addresses import PORT_MAX, host_and_port
from resp_server.settings.event_classes import ClassesError, classes_of, letters_of
from state_backend import log_lines

if TYPE_CHECKING:
    from state_backend.log.time_travel import AsOf

LOOPBACK = "127.0.0.1"


class Address(NamedTuple):
    """Where to listen; port 0: any free one."""

    host: str
    port: int


def whole_number(first: int, last: int, what: str) -> Callable[[str], int]:
    """Return the parser of an option's integer; ArgumentTypeError for another text, described by `what`."""

    def read(text: str) -> int:
        # The length is checked first, because int() of very many digits is slow.
        if not (text.isascii() and text.isdecimal() and len(text) <= len(str(last)) and first <= int(text) <= last):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what} from {first} to {last}")
        return int(text)

    return read


# The type of --port; 0: any free port.
tcp_port = whole_number(0, PORT_MAX, "a port")


def http_address(text: str) -> Address:
    """Parse the value of --metrics."""
    port = text.removeprefix(":")
    try:
        return Address(*host_and_port(text if ":" in port else f"{LOOPBACK}:{port}", port_min=0))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not [HOST:]PORT, such as 9379, 10.0.0.1:9379 or [::1]:9379"
        ) from None


def seconds(text: str) -> float:
    """Parse a number of seconds."""
    return _time(text, "seconds")


def minutes(text: str) -> float:
    """Parse a number of minutes."""
    return _time(text, "minutes")


def _time(text: str, unit: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of {unit}, 0 or more")
    return number


def port_range(text: str) -> range:
    """Parse FIRST-LAST, or one port."""
    first, dash, last = text.partition("-")
    numbers = (first, last if dash else first)
    are_ports = all(number.isdecimal() and int(number) <= PORT_MAX for number in numbers)
    if not are_ports or int(numbers[0]) > int(numbers[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no range of ports: write first-last, such as 7400-7500")
    return range(int(numbers[0]), int(numbers[1]) + 1)


def registry_address(text: str) -> str:
    """Check HOST:PORT."""
    try:
        host_and_port(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def advertised(text: str) -> tuple[str, int | None]:
    """Parse HOST or HOST:PORT. An IPv6 address without brackets is a HOST without a port."""
    host = text.strip("[]")
    if host and (":" not in host or _is_address(host)):
        return host, None
    try:
        return host_and_port(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither HOST nor HOST:PORT") from None


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def as_of(text: str) -> AsOf:
    """Parse the value of --as-of."""
    # Imported here, because clients use this module, and take as long to start without it.
    from state_backend.log.time_travel import AsOf

    try:
        return AsOf.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def names(text: str) -> tuple[str, ...]:
    """Parse names with commas between them."""
    return tuple(filter(None, map(str.strip, text.split(","))))


def rate_limit(text: str) -> RateLimit:
    """Parse the value of --rate-limit."""
    try:
        return RateLimit.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def event_letters(text: str) -> str:
    """Parse the classes of keyspace events; return their letters."""
    try:
        return letters_of(classes_of(text))
    except ClassesError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def levels(text: str) -> str:
    """Check the value of --loglevel."""
    try:
        log_lines.parse_levels(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def denied_command(text: str) -> str:
    """Return the name of a command that may be allowed, such as `config|set`."""
    # Imported here, because only an upstream needs the rows of all commands.
    from resp_server.command.policies import denied
    from resp_server.command.policy import UpstreamDenial

    name = "|".join(text.lower().split())
    allowable = denied(UpstreamDenial.UNLESS_ALLOWED)
    if name not in allowable:
        names = ", ".join(sorted(each.replace("|", " ").upper() for each in allowable))
        raise argparse.ArgumentTypeError(f"{text!r} is none of {names}")
    return name
