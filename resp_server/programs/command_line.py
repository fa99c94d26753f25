"""The common part of our programs: logging, and error messages."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from state_backend import log_lines
from state_backend.model.errors import SparkisError

logger = logging.getLogger("sparkis.server")


class CommandLineError(ValueError):
    """All mistakes of a command line."""

    def __init__(self, mistakes: Sequence[str]) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = mistakes


class Mistakes:
    """Collects the mistakes of a command line, so that all are reported together."""

    def __init__(self) -> None:
        self._found: dict[str, None] = {}

    def add(self, text: str) -> None:
        """Add a mistake."""
        self._found[text] = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Add the mistake that ends the block, if one does."""
        try:
            yield
        except CommandLineError as error:
            self._found |= dict.fromkeys(error.mistakes)
        except (SparkisError, ValueError, OSError) as error:
            self.add(message_of(error))

    def raise_if_any(self) -> None:
        """Raise CommandLineError if there are mistakes."""
        if self._found:
            raise CommandLineError(list(self._found))


@dataclass(frozen=True)
class Program:
    """One program: `sparkis NAME`, or `python -m` its module.

    SparkisError, ValueError and OSError end the program with a line on stderr, for each mistake of the command line,
    and code 1. The process ends with its program: from then on it ignores signals, one more of which would replace the
    exit code.

    Args:
        serve: Runs the program with the parsed options and returns an exit code, None for 0.
    """

    name: str
    description: str
    examples: str
    add_options: Callable[[argparse.ArgumentParser], None]
    serve: Callable[[argparse.Namespace], int | None]

    def run(self, options: argparse.Namespace) -> int:
        """Set up logging and run the program; return the exit code."""
        log_lines.set_up(options.loglevel, options.log_format)
        # Until `listening.Shutdown` sets its handlers.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        ends = (signal.SIGTERM, signal.SIGINT)
        for number in ends:
            signal.signal(number, _end_before_start)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*ends, signal.SIGHUP))  # a supervisor has blocked them
        try:
            return self.serve(options) or 0
        except (SparkisError, ValueError, OSError) as error:
            for each in mistakes_of(error):
                print(f"sparkis {self.name}: {each}", file=sys.stderr)
            return 1
        finally:
            for number in (*ends, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Parse a command line and run the program; return the exit code."""
        parser = argparse.ArgumentParser(
            prog=f"sparkis {self.name}",
            description=self.description,
            epilog=self.examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_options(parser)
        return self.run(parser.parse_args(arguments))


def mistakes_of(error: Exception) -> Sequence[str]:
    """Return the lines about an error: one for each mistake of a command line; without secrets."""
    lines = error.mistakes if isinstance(error, CommandLineError) else [message_of(error)]
    return [log_lines.hide_secrets(each) for each in lines]


def message_of(error: Exception) -> str:
    """Return an error's message, without the number of an operating system's error."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error)


def _end_before_start(number: int, frame: FrameType | None) -> None:
    logger.info("%s: ends before it has started", signal.Signals(number).name)
    raise SystemExit(0)
