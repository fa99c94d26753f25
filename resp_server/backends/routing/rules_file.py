"""Reads a file of rules, and logs rules of it that share some keys."""

from __future__ import annotations

import logging
from pathlib import Path

from resp_server.backends.routing.rule_overlaps import overlaps
from resp_server.backends.routing.rules import Rules, RulesError, parse_rules

logger = logging.getLogger("sparkis.proxy")

FILE_BYTES_MAX = 1 << 20


class RulesFile:
    """A file of rules."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Rules:
        """Return the rules of the file; RulesError. Rules that share some keys are logged."""
        try:
            with open(self.path, "rb") as file:
                content = file.read(FILE_BYTES_MAX + 1)
        except OSError as error:
            raise RulesError(str(self.path), [f"it cannot be read: {error.strerror}"]) from None
        if len(content) > FILE_BYTES_MAX:
            raise RulesError(str(self.path), [f"it has more than {FILE_BYTES_MAX} bytes"])
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RulesError(str(self.path), [f"it is not UTF-8: {error.reason} at byte {error.start}"]) from None
        rules = parse_rules(text, str(self.path))
        for warning in overlaps(rules):
            logger.warning("%s: %s", self.path, warning)
        return rules
