"""A row of the table of settings: a field of a dataclass, with its option, help, bounds and places."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, TypeVar, cast

# The programs, by their names on the command line.
SERVE, PROXY, STATE_SERVER, REGISTRY, ATTACH, SWAP_CHECK = (
    "serve",
    "proxy",
    "state-server",
    "registry",
    "attach",
    "swap-check",
)
# The programs that answer Redis clients.
SERVERS = (SERVE, PROXY, STATE_SERVER)
# The programs that only connect to servers, and the commands of a proxy with an upstream.
CLIENTS = (SWAP_CHECK, "status", "health", "owners", "confirm", "release", "reload", "shadow")

NOTHING: Mapping[str, Any] = MappingProxyType({})
# The key of a row in the metadata of its field.
ROW = "setting"
# The option of a row whose option is its field's name.
DERIVED = "-"
Value = TypeVar("Value")


def text_of(value: Any) -> str:
    """Return the text of a value in CONFIG GET."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(value) if isinstance(value, tuple) else "" if value is None else str(value)


@dataclass(frozen=True)
class InConfig:
    """How CONFIG shows and changes a setting.

    Args:
        parse: Makes a value from an argument of CONFIG SET, and raises SettingError; None: the setting cannot change.
        render: Makes the text of CONFIG GET.
        in_file: Makes the text of CONFIG REWRITE, if the option has other texts.
    """

    parse: Callable[[bytes], Any] | None = None
    render: Callable[[Any], str] = text_of
    in_file: Callable[[Any], str] | None = None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is known of one setting.

    name        its field
    default     the field's default
    help        what --help says; None: the option is hidden, because sparkis itself gives it
    option      the option without dashes: also the key in files, in CONFIG, and, in upper case, in the environment;
                "": there is no option. Default: the field's name, after `prefix`
    programs    which have the option, by name
    argument    further arguments of `ArgumentParser.add_argument`, such as `type` and `metavar`
    in_program  by program: other arguments there, and another `help` and `note`
    section     the part of the help that has the option (see `programs.SECTIONS`)
    title       the title of the option's group in the help; "": it has none
    keyword     the keyword of `sparkis.serve`; "": none, or the field of a group
    spark       the setting of Spark, without `spark.sparkis.`; "": there is none
    variable    the environment's variable that has the option's default, also where other variables are not read
    config      how CONFIG has it; None: CONFIG does not
    at_once     SIGHUP applies a change of the file, although CONFIG SET cannot change it
    is_secret   `sparkis config show` hides it
    note        what docs/ adds to that, in Markdown: sentences, or a reference in parentheses
    """

    name: str = ""
    default: Any = None
    help: str | None = None
    option: str = DERIVED
    prefix: str = ""
    programs: tuple[str, ...] = ()
    argument: Mapping[str, Any] = field(default_factory=dict)
    in_program: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    section: str = ""
    title: str = ""
    keyword: str = ""
    spark: str = ""
    variable: str = ""
    config: InConfig | None = None
    at_once: bool = False
    is_secret: bool = False
    note: str = ""

    @property
    def is_modifiable(self) -> bool:
        """Return whether CONFIG SET can change it."""
        return self.config is not None and self.config.parse is not None

    @property
    def dest(self) -> str:
        """The name of the option's value in parsed options."""
        return self.option.replace("-", "_")

    def arguments_in(self, program: str) -> dict[str, Any]:
        """Return the arguments of `add_argument` in a program."""
        default = os.environ.get(self.variable) if self.variable else _of_option(self.default)
        arguments = {"default": default, "help": self.help, **self.argument, **self.in_program.get(program, NOTHING)}
        arguments.pop("note", None)
        if arguments["help"] is None:
            arguments["help"] = argparse.SUPPRESS
        if arguments.get("action") == "store_true":
            return {"action": "store_true", "help": arguments["help"]}
        if arguments.get("required"):
            del arguments["default"]
        return arguments

    def help_in(self, program: str) -> str:
        """Return what --help says, with the default's value; "" for a hidden option."""
        arguments = self.arguments_in(program)
        text = arguments["help"]
        return "" if text == argparse.SUPPRESS else str(text) % {"default": arguments.get("default")}

    def note_in(self, program: str) -> str:
        """Return what docs/ adds for a program."""
        return str(self.in_program.get(program, NOTHING).get("note", self.note))

    def value_of(self, options: argparse.Namespace) -> Any:
        """Return the value that parsed options have, as the field has it; the default if they have none."""
        value = getattr(options, self.dest, None)
        if value is None:
            return self.default
        if isinstance(self.default, bool):
            return value == "yes"
        if isinstance(self.default, tuple):
            return tuple(value)
        return self.joined(self.default, value)

    def joined(self, before: Any, value: Any) -> Any:
        """Return a new value; one with parts keeps those before that it does not have."""
        return {**before, **value} if isinstance(value, dict) else value


def _of_option(default: Any) -> Any:
    """Return the default of an option for that of a field."""
    if isinstance(default, bool):
        return text_of(default)
    return list(default) if isinstance(default, tuple) else default


def setting(
    initial: Value, help: str | None = None, programs: tuple[str, ...] = (), *, repr: bool = True, **known: Any
) -> Value:
    """Declare a row, in place of a field's default.

    initial, repr: the field's; known: what `Setting` has, and further arguments of `add_argument`.
    """
    own = {name: known.pop(name) for name in list(known) if name in OWN}
    row = Setting(default=initial, help=help, programs=programs, argument=known, **own)
    declared: Any
    if isinstance(initial, dict):
        declared = field(default_factory=initial.copy, metadata={ROW: row})
    else:
        declared = field(default=initial, metadata={ROW: row}, repr=repr)
    return cast(Value, declared)


# What a row has beside the arguments of its option.
OWN = {each.name for each in fields(Setting)} - {"name", "default", "help", "programs", "argument"}


def rows_of(section: type[Any]) -> list[Setting]:
    """Return the rows of a dataclass, in the order of its fields."""
    found = [(each.name, each.metadata[ROW]) for each in fields(section) if ROW in each.metadata]
    return [replace(row, name=name, option=_option_of(row, name)) for name, row in found]


def _option_of(row: Setting, name: str) -> str:
    return row.prefix + name.replace("_", "-") if row.option == DERIVED else row.option


def add_rows(parser: argparse.ArgumentParser, rows: Iterable[Setting], program: str) -> None:
    """Add the options of rows that a program has."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for row in rows:
        if program not in row.programs:
            continue
        if row.title and row.title not in groups:
            groups[row.title] = parser.add_argument_group(row.title)
        target = groups[row.title] if row.title else parser
        target.add_argument(f"--{row.option}", **row.arguments_in(program))


def documented(group: type[Value]) -> type[Value]:
    """Add what --help says of each field to the docstring of a group, for `help`."""
    lines = [f"    {row.name}: {row.help_in('')}." for row in rows_of(group)]
    group.__doc__ = "\n".join([group.__doc__ or "", "", "Args:", *lines])
    return group
