"""A program's options in a configuration file and in the environment; the command line takes precedence.

A configuration file is TOML. Its keys are the names of options, in a table named after the program; keys before the
first table are for all programs. In the environment, `SPARKIS_UPSTREAM_TIMEOUT` is `--upstream-timeout`. The program's
own parser knows each option's type, so a value has the same rules everywhere.
"""

from __future__ import annotations

import argparse
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple

from resp_server.net.text_files import read_text
from resp_server.programs.command_line import Mistakes

PREFIX = "SPARKIS_"
FILE_VARIABLE = "SPARKIS_CONFIG"
DEFAULT = "default"
COMMAND_LINE = "command line"
# Options that are about one start of a program, or mean something else than a server's option of that name, by `dest`.
NOT_CONFIGURABLE = {"help", "config", "driver_log", "answer_timeout"}
# Beside a Service named `sparkis`, Kubernetes gives each pod SPARKIS_PORT=tcp://10.0.0.1:7379.
KUBERNETES_ADDRESS = re.compile(r"(tcp|udp|sctp)://")
TLS_FILES = ("tls-cert-file", "tls-key-file", "tls-ca-cert-file")
TABLE = re.compile(r"""\s*\[\s*["']?([\w-]+)["']?\s*\]""")
KEY = re.compile(r"""\s*["']?([\w-]+)["']?\s*=""")


class ConfigValue(NamedTuple):
    """A value that is not from the command line.

    Args:
        origin: The file and line, or the variable.
    """

    value: Any
    origin: str


@dataclass(frozen=True)
class ConfigFile:
    """A configuration file as it was read: the values by table and key, "" for keys before the first table."""

    path: str
    tables: Mapping[str, Mapping[str, ConfigValue]]

    @classmethod
    def read(cls, path: str) -> ConfigFile:
        """Read a file; OSError, ValueError with the file and line if it is no TOML."""
        try:
            text = read_text(path)
            parsed = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: {error}") from None
        lines = _lines_of(text)
        tables: dict[str, dict[str, ConfigValue]] = {"": {}}
        for name, value in parsed.items():
            if isinstance(value, dict):
                tables[name] = {
                    key: ConfigValue(each, _at(path, lines.get((name, key)))) for key, each in value.items()
                }
            else:
                tables[""][name] = ConfigValue(value, _at(path, lines.get(("", name))))
        return cls(path, tables)

    def values_for(self, program: str) -> Mapping[str, ConfigValue]:
        """Return the values of a program; those of its own table take precedence over those for all programs."""
        return {**self.tables[""], **self.tables.get(program, {})}


def _lines_of(text: str) -> dict[tuple[str, str], int]:
    """Return the line of each key, by table and key."""
    table = ""
    lines: dict[tuple[str, str], int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if found := TABLE.match(line):
            table = found[1]
        elif found := KEY.match(line):
            lines.setdefault((table, found[1]), number)
    return lines


def _at(path: str, line: int | None) -> str:
    return path if line is None else f"{path}:{line}"


def options_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the options that a file and the environment may give, by name without dashes."""
    return {
        action.option_strings[-1].lstrip("-"): action
        for action in parser._actions
        if action.option_strings and action.dest not in NOT_CONFIGURABLE and action.help != argparse.SUPPRESS
    }


def variable_of(name: str) -> str:
    """Return the environment's name of an option."""
    return PREFIX + name.upper().replace("-", "_")


class Configuration:
    """The values of one program's options, and where each is from.

    Args:
        parser: The program's. Its defaults become the values of the file and the environment.
    """

    def __init__(
        self, program: str, parser: argparse.ArgumentParser, file: ConfigFile | None, environment: Mapping[str, str]
    ) -> None:
        self.program = program
        self.file = file
        self.options = options_of(parser)
        self._parser = parser
        self.origins = dict.fromkeys(self.options, DEFAULT)
        self._values: dict[str, Any] = {}
        mistakes = Mistakes()
        for name, found in self._given(environment):
            try:
                self._values[name] = value_of(self.options[name], found.value)
                self.origins[name] = found.origin
            except ValueError as error:
                mistakes.add(f"{found.origin}: {name}: {error}")
        if file is not None:
            for text in unknown_keys(file, program, self.options):
                mistakes.add(text)
        mistakes.raise_if_any()

    def _given(self, environment: Mapping[str, str]) -> Iterator[tuple[str, ConfigValue]]:
        """Yield the options that have a value; the environment takes precedence over the file."""
        in_file = {} if self.file is None else self.file.values_for(self.program)
        for name in self.options:
            text = environment.get(variable_of(name))
            if text is not None and not (name == "port" and KUBERNETES_ADDRESS.match(text)):
                yield name, ConfigValue(text, variable_of(name))
            elif name in in_file:
                yield name, in_file[name]

    def set_defaults(self, given: Iterable[str]) -> None:
        """Make the values the parser's defaults, but for options that the command line has, by `dest`."""
        on_command_line = set(given)
        for group in self._parser._mutually_exclusive_groups:
            if any(action.dest in on_command_line for action in group._group_actions):
                self._leave_out(action.dest for action in group._group_actions)
        for name, action in self.options.items():
            if action.dest in on_command_line:
                self.origins[name] = COMMAND_LINE
            elif name in self._values:
                action.default, action.required = self._values[name], False

    def leave_out_idle(self, options: argparse.Namespace) -> None:
        """Unset a client's TLS files if its URL has no TLS. They may be meant for a server of the same file."""
        if getattr(options, "url", "rediss:").startswith("rediss:"):
            return
        idle = {name: action for name, action in self.options.items() if name in TLS_FILES}
        for name, action in idle.items():
            if self.origins[name] not in (DEFAULT, COMMAND_LINE):
                setattr(options, action.dest, None)
        self._leave_out(action.dest for action in idle.values())

    def _leave_out(self, dests: Iterable[str]) -> None:
        """Forget the values of some options that are not from the command line."""
        left_out = set(dests)
        for name, action in self.options.items():
            if action.dest in left_out and self.origins[name] not in (DEFAULT, COMMAND_LINE):
                self.origins[name] = DEFAULT
                del self._values[name]


def value_of(action: argparse.Action, value: Any) -> Any:
    """Return the value of an option, parsed as on the command line; the text of ValueError says what is allowed.

    Args:
        value: A variable's text, which for an option with several values is split like a shell's words; or a value of
            TOML.
    """
    takes_several = action.nargs in ("+", "*") or isinstance(action, argparse._AppendAction)
    if action.nargs == 0:
        if value in (True, "yes", "true") or value in (False, "no", "false"):
            return value in (True, "yes", "true")
        raise ValueError(f"{value!r} is neither true nor false")
    if not takes_several:
        return _one_value(action, value)
    words = shlex.split(value) if isinstance(value, str) else value
    if not isinstance(words, list) or not words:
        raise ValueError(f"{value!r} is not a list of values")
    return [_one_value(action, word) for word in words]


def _one_value(action: argparse.Action, value: Any) -> Any:
    if isinstance(value, bool) and action.choices is not None and set(action.choices) == {"yes", "no"}:
        value = "yes" if value else "no"
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{value!r} is neither a text nor a number")
    convert = action.type if callable(action.type) else str
    try:
        result = convert(str(value))
    except argparse.ArgumentTypeError as error:
        raise ValueError(str(error)) from None
    except (ValueError, TypeError):
        raise ValueError(f"{value!r} is not a value of type {getattr(convert, '__name__', 'text')}") from None
    if action.choices is not None and result not in action.choices:
        raise ValueError(f"{value!r} is none of {', '.join(map(str, action.choices))}")
    return result


def unknown_keys(file: ConfigFile, program: str, options: Iterable[str]) -> list[str]:
    """Return a mistake for each key of a program's table that is no option of it."""
    names = list(options)
    return [
        f"{found.origin}: {key} is no option of sparkis {program}{nearest(key, names)}"
        for key, found in file.tables.get(program, {}).items()
        if key not in names
    ]


def nearest(word: str, names: Iterable[str]) -> str:
    """Return a hint with the name that is most like a misspelled word, or nothing."""
    found = get_close_matches(word, list(names), 1)
    return f" (did you mean {found[0]}?)" if found else ""


def check_all(
    file: ConfigFile | None, parsers: Mapping[str, argparse.ArgumentParser], environment: Mapping[str, str]
) -> None:
    """Check a file and the environment for all programs; CommandLineError with all mistakes."""
    mistakes = Mistakes()
    for program, parser in parsers.items():
        with mistakes.noted():
            Configuration(program, parser, file, environment)
    known = {name for parser in parsers.values() for name in options_of(parser)}
    if file is not None:
        for table, values in file.tables.items():
            if table and table not in parsers:
                first = next(iter(values.values()), None)
                at = file.path if first is None else first.origin
                mistakes.add(f"{at}: [{table}] is no program that reads this file{nearest(table, parsers)}")
        for key, found in file.tables[""].items():
            if key not in known:
                mistakes.add(f"{found.origin}: {key} is no option of any program{nearest(key, known)}")
    mistakes.raise_if_any()


def given_options(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Return only the options that a command line has. The parser must not be used for anything else."""
    for action in parser._actions:
        action.default, action.required = argparse.SUPPRESS, False
    return parser.parse_known_args(words)[0]


def read_configuration(
    program: str,
    parsers: tuple[argparse.ArgumentParser, argparse.ArgumentParser],
    words: Sequence[str],
    environment: Mapping[str, str],
) -> Configuration:
    """Read the configuration of a command line, and make it the defaults of the first parser.

    CommandLineError, OSError, ValueError.

    Args:
        parsers: Two of the same program; the second is used up.
    """
    parser, scanner = parsers
    given = vars(given_options(scanner, words))
    path = given.get("config") or environment.get(FILE_VARIABLE)
    configuration = Configuration(program, parser, ConfigFile.read(path) if path else None, environment)
    configuration.set_defaults(given)
    return configuration
