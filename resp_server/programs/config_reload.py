"""Reads the configuration file again after SIGHUP, and applies the settings that may change while a program runs."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping
from typing import Any

from resp_server.programs.command_line import mistakes_of
from resp_server.programs.configuration import Configuration
from resp_server.programs.listening import config_of
from resp_server.serving.server import Server
from resp_server.settings.programs import TABLE, rows_for
from resp_server.settings.server import ROWS, ServerConfig
from resp_server.settings.setting import REGISTRY
from resp_server.workers.master import Workers
from state_backend import log_lines
from state_backend.model.errors import SparkisError

logger = logging.getLogger("sparkis.server")

# The fields of ServerConfig that may change while a server runs, and the options that change them.
FIELDS = {row.name for row in ROWS.values() if row.is_modifiable}
APPLIED = {row.option for row in TABLE if row.is_modifiable or row.at_once}
# Those that a program without Redis clients has.
LOG_OPTIONS = {row.option for row in rows_for(REGISTRY) if row.option in APPLIED}


class ConfigReload:
    """Reloads the configuration file of a program.

    Args:
        server: None: the program has none, and only what it logs may change.
    """

    def __init__(self, options: argparse.Namespace, server: Server | Workers | None) -> None:
        self._server = server
        configuration: Configuration | None = getattr(options, "configuration", None)
        self._file = None if configuration is None else configuration.file
        if self._file is not None:
            self._parse_again: Callable[[], argparse.Namespace] = options.parse_again
            self._options = self._parse_again()  # `options` may have other values by now, such as a port

    def reload(self) -> None:
        """Apply what has changed in the file since it was last read; log mistakes, and then nothing changes."""
        if self._file is None:
            return
        try:
            options = self._parse_again()
            changes = {} if self._server is None else _changes(config_of(self._options), config_of(options))
        except (SparkisError, ValueError, OSError) as error:
            for each in mistakes_of(error):
                logger.error("SIGHUP: %s; nothing changes", each)
            return
        if self._server is not None and changes:
            self._server.configure(changes)
        changed = self._changed_options(options)
        if changed & LOG_OPTIONS:
            set_up_log = log_lines.set_up if self._server is None else self._server.set_up_log
            set_up_log(options.loglevel, options.log_format)
        applicable = LOG_OPTIONS if self._server is None else APPLIED
        applied = sorted(changed & applicable)
        logger.info(
            "SIGHUP: read %s; %s",
            self._file.path,
            f"changed: {', '.join(applied)}" if applied else "no setting changed",
        )
        if waiting := sorted(changed - applicable):
            logger.warning("SIGHUP: restart to apply what changed in %s: %s", self._file.path, ", ".join(waiting))
        self._options = options

    def _changed_options(self, options: argparse.Namespace) -> set[str]:
        """Return the names of the options whose values differ from those last read."""
        before, after = vars(self._options), vars(options)
        named = self._options.configuration.options
        return {name for name, action in named.items() if before[action.dest] != after[action.dest]}


def _changes(before: ServerConfig, after: ServerConfig) -> Mapping[str, Any]:
    """Return the fields that differ, with their new values."""
    return {name: getattr(after, name) for name in FIELDS if getattr(after, name) != getattr(before, name)}
