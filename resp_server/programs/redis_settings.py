"""Options for Redis' settings that CONFIG SET can change, under Redis' names."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from resp_server.commands.config import SettingError, changes_of

# The other modifiable settings have options of their own.
SETTINGS = {
    "acllog-max-len": ("N", "entries of ACL LOG (default 128)"),
    "client-output-buffer-limit": (
        "'CLASS HARD SOFT SECONDS'",
        "the limits of unsent output of normal clients and of pubsub (default 'normal 1gb 0 0 pubsub 32mb 8mb 60')",
    ),
    "client-query-buffer-limit": ("BYTES", "the longest unfinished request of a client (default 1gb)"),
    "latency-monitor-threshold": ("MS", "requests that take this long are events of LATENCY (default 0: none)"),
    "proto-max-bulk-len": ("BYTES", "the longest argument of a request (default 1mb)"),
    "slowlog-log-slower-than": ("US", "requests that take longer, in microseconds, are in SLOWLOG (default 10000)"),
    "slowlog-max-len": ("N", "entries of SLOWLOG (default 128)"),
    "tcp-keepalive": ("SECONDS", "the pause before probes of an idle connection (default 300; 0: none)"),
    "tracking-table-max-keys": ("N", "keys in the table of CLIENT TRACKING (default 1000000; 0: no limit)"),
}


def add_redis_settings(parser: argparse.ArgumentParser) -> None:
    """Add an option for each setting; its value has the fields of ServerConfig that change."""
    group = parser.add_argument_group("settings of Redis, which CONFIG SET can change")
    for name, (metavar, text) in SETTINGS.items():
        group.add_argument(f"--{name}", type=_setting(name), metavar=metavar, help=text)


def _setting(name: str) -> Callable[[str], Mapping[str, Any]]:
    def parse(text: str) -> Mapping[str, Any]:
        try:
            return changes_of(name, text.encode())
        except SettingError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

    return parse


def redis_settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of ServerConfig that the options change."""
    changes: dict[str, Any] = {}
    for name in SETTINGS:
        changes |= getattr(options, name.replace("-", "_"), None) or {}
    return changes
