"""`sparkis config`: checks a configuration file, and shows where the values of a program's options are from."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping

from resp_server.net.client import without_login
from resp_server.programs.command_line import mistakes_of
from resp_server.programs.configuration import FILE_VARIABLE, ConfigFile, Configuration, check_all
from resp_server.settings.programs import TABLE
from state_backend.log_lines import hide_secrets

DESCRIPTION = "Check a configuration file, or show each option of a program and where its value is from."
EXAMPLES = """\
examples:
  sparkis config check sparkis.toml
  sparkis config show serve --config sparkis.toml
  SPARKIS_MAXCLIENTS=500 sparkis config show proxy --json
"""
SECRETS = {row.option for row in TABLE if row.is_secret}
URLS = {"url", "upstream"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="check|show")
    check = actions.add_parser("check", help="check a file and the environment for all programs")
    check.add_argument(
        "file", nargs="?", metavar="FILE", help=f"the file (default: {FILE_VARIABLE} of the environment)"
    )
    show = actions.add_parser("show", help="show the options of a program, without those of a command line")
    show.add_argument("program", metavar="PROGRAM", help="such as serve or proxy")
    show.add_argument(
        "--config", dest="file", metavar="FILE", help=f"the file (default: {FILE_VARIABLE} of the environment)"
    )
    show.add_argument("--json", action="store_true", help="print JSON")


def run(parsers: Mapping[str, argparse.ArgumentParser], options: argparse.Namespace) -> int:
    """Check or show; return the exit code.

    Args:
        parsers: The parsers of the programs that read configuration files.
    """
    path = options.file or os.environ.get(FILE_VARIABLE)
    try:
        file = ConfigFile.read(path) if path else None
        if options.action == "check":
            return _check(file, parsers)
        if options.program not in parsers:
            raise ValueError(f"{options.program!r} is none of {', '.join(parsers)}")
        parser = parsers[options.program]
        _show(parser, Configuration(options.program, parser, file, os.environ), as_json=options.json)
    except BrokenPipeError:
        raise  # of the reader of the output, not of the file
    except (ValueError, OSError) as error:
        for each in mistakes_of(error):
            print(f"sparkis config: {each}", file=sys.stderr)
        return 1
    return 0


def _check(file: ConfigFile | None, parsers: Mapping[str, argparse.ArgumentParser]) -> int:
    check_all(file, parsers, os.environ)
    if file is None:
        print(f"no file is given, by name or by {FILE_VARIABLE}; the environment has no mistakes")
    else:
        print(f"{file.path}: {sum(map(len, file.tables.values()))} values, no mistakes")
    return 0


def _show(parser: argparse.ArgumentParser, configuration: Configuration, *, as_json: bool) -> None:
    configuration.set_defaults(())
    rows = [
        (name, _shown(name, action.default), configuration.origins[name])
        for name, action in configuration.options.items()
    ]
    if as_json:
        print(json.dumps({name: {"value": value, "from": origin} for name, value, origin in rows}, indent=2))
        return
    widths = [max(len(row[index]) for row in [("option", "value", "from"), *rows]) for index in range(2)]
    for name, value, origin in [("option", "value", "from"), *rows]:
        print(f"{name:{widths[0]}}  {value:{widths[1]}}  {origin}".rstrip())


def _shown(name: str, value: object) -> str:
    """Return the text of a value; passwords are hidden."""
    if value is None or value == [] or value == "":
        return "-"
    if name in SECRETS:
        return "(hidden)"
    if isinstance(value, (list, tuple)):
        text = shlex.join(map(str, value))  # as the environment has it
    elif isinstance(value, Mapping):
        text = " ".join(str(number) for limits in value.values() for number in limits)  # of clients' output
    else:
        text = str(value)
    return without_login(text) if name in URLS and "://" not in text else hide_secrets(text)
