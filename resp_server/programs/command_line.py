"""What our programs have in common: how a command line becomes options, where it logs, and how one fails."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from resp_server.net.addresses import PORT_MAX
from state_backend.model.errors import SparkisError

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class Program:
    """One of them: `sparkis NAME`, or a module that is run by itself.

    serve: does all of it, with options that `add_options` made; an exit code, or None for 0. What it raises for a user
    to read ends the program with one line and code 1.
    """

    name: str
    description: str
    examples: str
    add_options: Callable[[argparse.ArgumentParser], None]
    serve: Callable[[argparse.Namespace], int | None]

    def run(self, options: argparse.Namespace) -> int:
        """Log as the options say, and serve until it is over; return the exit code."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until `until_shutdown` sets a handler
        logging.basicConfig(
            level=options.loglevel.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
        )
        try:
            return self.serve(options) or 0
        except (SparkisError, ValueError, OSError) as error:
            print(f"sparkis {self.name}: {message_of(error)}", file=sys.stderr)
            return 1

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run it from a command line; return the exit code."""
        parser = argparse.ArgumentParser(
            prog=f"sparkis {self.name}",
            description=self.description,
            epilog=self.examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_options(parser)
        return self.run(parser.parse_args(arguments))


def whole_number(first: int, last: int, what: str) -> Callable[[str], int]:
    """Return what reads an option's value; anything but a whole number of these is refused, and said what it is not."""

    def read(text: str) -> int:
        # No number here has more digits than the last one that may be given; int() of very many takes long.
        if not (text.isascii() and text.isdecimal() and len(text) <= len(str(last)) and first <= int(text) <= last):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what} from {first} to {last}")
        return int(text)

    return read


# What --port takes; 0 stands for a free one.
tcp_port = whole_number(0, PORT_MAX, "a port")


def message_of(error: Exception) -> str:
    """Return what an error says to a person: without the number that the system's errors have."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error)


def add_level_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that `run` needs."""
    parser.add_argument("--loglevel", choices=LOG_LEVELS, default="info", help="what is logged (default %(default)s)")
