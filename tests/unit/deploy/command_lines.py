"""Files of `deploy/`, and the command lines in them, parsed as `sparkis` does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from spark_hooks.cli import COMMANDS

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
CONTAINERFILE = (DEPLOY / "container" / "Containerfile").read_text()
# The user of the image and of the pods.
USER = 10001


class WrongCommandLineError(Exception):
    """What argparse says about a command line."""


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are exceptions."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise WrongCommandLineError(message)


def options_of(words: Sequence[str]) -> argparse.Namespace:
    """Return the options of `sparkis WORDS`; WrongCommandLineError if the command or an option does not exist."""
    found = next((each for each in COMMANDS if each.name == words[0]), None)
    if found is None:
        raise WrongCommandLineError(f"there is no command {words[0]}")
    parser = Parser(prog=f"sparkis {words[0]}", allow_abbrev=False)
    found.load().add_options(parser)
    return parser.parse_args(list(words[1:]))
