"""How the values of settings are written in CONFIG, as in Redis, whose texts the errors have."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from resp_server.command.handler import integer
from resp_server.protocol.errors import ReplyError, client_text
from resp_server.settings.event_classes import ClassesError, classes_of, letters_of
from state_backend import log_lines

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MIB = 1 << 20
# The most that CONFIG SET accepts for a client's output buffer.
OUTPUT_BYTES_MAX = 1 << 30
UNITS = {"": 1, "b": 1, "k": 1000, "kb": 1 << 10, "m": 10**6, "mb": 1 << 20, "g": 10**9, "gb": 1 << 30}

# The limits of a client's unsent output: bytes that close it at once, and bytes that do after so many seconds.
OutputLimits = tuple[int, int, int]


class SettingError(ValueError):
    """An invalid value of a setting; the text is Redis'."""


def option_of(parse: Callable[[bytes], Any]) -> Callable[[str], Any]:
    """Return the parser of an option whose values are those of CONFIG SET."""

    def read(text: str) -> Any:
        try:
            return parse(text.encode())
        except SettingError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

    return read


def integer_between(minimum: int, maximum: int) -> Callable[[bytes], int]:
    """Return a parser of integers."""

    def parse(word: bytes) -> int:
        try:
            value = integer(word)
        except ReplyError:
            raise SettingError("argument couldn't be parsed into an integer") from None
        return value if minimum <= value <= maximum else _checked(value, minimum, maximum)

    return parse


def memory_size(minimum: int, maximum: int) -> Callable[[bytes], int]:
    """Return a parser of sizes in bytes, such as `64mb`."""

    def parse(word: bytes) -> int:
        text = word.decode("latin-1").lower()
        digits = text.rstrip("bkmg")
        unit = UNITS.get(text[len(digits) :])
        if unit is None or not digits.isdecimal() or not digits.isascii():
            raise SettingError("argument must be a memory value")
        return _checked(int(digits) * unit, minimum, maximum)

    return parse


def yes_or_no(word: bytes) -> bool:
    """Parse `yes` or `no`."""
    if word.lower() not in (b"yes", b"no"):
        raise SettingError("argument must be 'yes' or 'no'")
    return word.lower() == b"yes"


def _checked(value: int, minimum: int, maximum: int) -> int:
    if not minimum <= value <= maximum:
        raise SettingError(f"argument must be between {minimum} and {maximum} inclusive")
    return value


def parse_password(word: bytes) -> str | None:
    """Parse a password; an empty one is none."""
    return word.decode("utf-8", "surrogateescape") or None


OUTPUT_CLASSES = ("normal", "pubsub")


def output_limits(word: bytes) -> Mapping[str, OutputLimits]:
    """Parse `normal 1gb 0 0 pubsub 32mb 8mb 60`, or one of the two classes; a hard limit of 0 is refused."""
    words = word.decode("latin-1").split()
    if not words or len(words) % 4:
        raise SettingError("Wrong number of arguments in buffer limit configuration.")
    found: dict[str, OutputLimits] = {}
    for name, hard, soft, soft_seconds in zip(*[iter(words)] * 4, strict=True):
        if name.lower() not in OUTPUT_CLASSES:
            raise SettingError("Invalid client class specified in buffer limit configuration.")
        try:
            sizes = memory_size(1, OUTPUT_BYTES_MAX)(hard.encode()), memory_size(0, OUTPUT_BYTES_MAX)(soft.encode())
            found[name.lower()] = (*sizes, integer_between(0, INT32_MAX)(soft_seconds.encode()))
        except SettingError:
            text = "Error in hard, soft or soft_seconds setting in buffer limit configuration."
            raise SettingError(f"{text} A hard limit is 1 to {OUTPUT_BYTES_MAX}") from None
    return found


def output_limits_text(limits: Mapping[str, OutputLimits]) -> str:
    """Return the text of output limits."""
    return " ".join(f"{name} {' '.join(map(str, limits[name]))}" for name in OUTPUT_CLASSES if name in limits)


def event_classes(word: bytes) -> str:
    """Parse the classes of keyspace events; return their letters."""
    try:
        return letters_of(classes_of(word.decode("latin-1")))
    except ClassesError as error:
        raise SettingError(str(error)) from None


# Redis' levels, and those that log the same here.
LEVELS = {"debug": "debug", "verbose": "info", "notice": "info", "warning": "warning", "nothing": "nothing"}
SHOWN_LEVELS = {"info": "notice", "error": "warning"}


def log_levels(word: bytes) -> str:
    """Parse a level of Redis or of `--loglevel`, and the levels of some parts: `notice,sparkis.tls=debug`."""
    found = []
    for each in word.decode("utf-8", "replace").lower().split(","):
        part, is_given, level = each.rpartition("=")
        if level not in LEVELS and level not in log_lines.LEVELS:
            raise SettingError(f"argument(s) must be one of the following: {', '.join(LEVELS)}")
        if is_given and part not in log_lines.PARTS:
            known = ", ".join(log_lines.PARTS)
            raise SettingError(f"{client_text(part.encode())} is no part of sparkis; give one of {known}")
        found.append(f"{part}{is_given}{LEVELS.get(level, level)}")
    return ",".join(found)


def shown_levels(text: str) -> str:
    """Return levels by Redis' names."""
    parts = (each.rpartition("=") for each in text.lower().split(","))
    return ",".join(f"{part}{equals}{SHOWN_LEVELS.get(level, level)}" for part, equals, level in parts)
