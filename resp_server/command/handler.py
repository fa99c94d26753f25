"""The handler of a command: a function with a decorator, whose signature has the command's arguments.

    @command("getrange")
    def getrange(context: ReadContext, key: bytes, start: int, end: int) -> bytes:
        '''Returns a substring of the string stored at a key.'''

The parameters after `context` are the command's arguments, in order:

    bytes                       the argument as sent
    int                         a 64-bit number
    Annotated[type, convert]    the result of `convert`, which takes bytes and may raise ReplyError
    a default value             makes the argument optional
    *rest, *rest: OneOrMore     any number of arguments; at least one
    NameAsTyped (the first)     the command's name as the client typed it
    BatchArgument (the only one)  this argument of several requests; the function returns the replies to one or more of
                                them, from the first on

Arity, conversion and error texts follow from the signature. The docstring's first line is the summary in COMMAND DOCS.
All other facts of a Redis command are in the reference table; those of a command of ours are given to the decorator.

The function returns plain Python values (see `protocol.replies`) or raises ReplyError. To query the other processes
that serve the same port, it uses `ServerContext.gather` and a function that is declared with `@worker_query("...")`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import ModuleType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from resp_server.command.spec import CommandSpec
from resp_server.protocol.errors import GenericError, not_an_integer, wrong_arity, wrong_subcommand
from resp_server.protocol.replies import Reply

Body = Callable[..., Reply]
Convert = Callable[[bytes], Any]
# A function of (the `ServerContext` of the process, the argument of the query).
Respond = Callable[[Any, Any], Any]

INTEGER = re.compile(rb"0|-?[1-9][0-9]{0,18}")
INTEGER_MAX = 2**63 - 1
INT32_MAX = 2**31 - 1
DIGITS_MAX = len(str(INTEGER_MAX))


class DeclarationError(Exception):
    """A command's handler is invalid; raised at start-up."""


class _AtLeastOne:
    """Marks a `*rest` that must not be empty."""


OneOrMore = Annotated[bytes, _AtLeastOne]


class _OfEachRequest:
    """Marks a parameter that takes the arguments of several requests."""


BatchArgument = Annotated[Sequence[bytes], _OfEachRequest]


class _Name:
    """Marks the parameter that is the command's name as the client typed it."""


NameAsTyped = Annotated[bytes, _Name]


def is_integer(argument: bytes) -> bool:
    """Return whether an argument is a 64-bit number for Redis' string2ll: no plus sign, no leading zero, no space."""
    return INTEGER.fullmatch(argument) is not None and -INTEGER_MAX - 1 <= int(argument) <= INTEGER_MAX


def integer(argument: bytes) -> int:
    """Return an argument as a 64-bit number; GenericError if it is not one."""
    if argument.isdigit() and len(argument) < DIGITS_MAX and (not argument.startswith(b"0") or argument == b"0"):
        return int(argument)  # most are
    if not is_integer(argument):
        raise not_an_integer()
    return int(argument)


def check_32_bits(number: int) -> None:
    """Raise GenericError if a number has more than 32 bits: Redis reads a database's number as a C int."""
    if not -INT32_MAX - 1 <= number <= INT32_MAX:
        raise GenericError(f"value is out of range, value must between {-INT32_MAX - 1} and {INT32_MAX}")


def integer_at_least(argument: bytes, minimum: int, error: str) -> int:
    """Return an argument as a 64-bit number; GenericError with this text if it is smaller, or is no number."""
    try:
        number = integer(argument)
    except GenericError:
        number = minimum - 1
    if number < minimum:
        raise GenericError(error)
    return number


@dataclass(frozen=True)
class Parameter:
    """One argument, or a repeated one."""

    convert: Convert | None = None
    is_required: bool = True
    is_repeated: bool = False


@dataclass(frozen=True)
class Parameters:
    """The arguments of a command: their number and their conversion."""

    each: Sequence[Parameter]
    has_name: bool = False
    is_batch: bool = False

    @classmethod
    def of(cls, body: Body) -> Parameters:
        """Return the parameters of a function's signature; DeclarationError if no command can have them."""
        hints = get_type_hints(body, include_extras=True)
        parameters = list(inspect.signature(body).parameters.values())[1:]
        has_name = bool(parameters) and hints.get(parameters[0].name) is NameAsTyped
        is_batch = BatchArgument in hints.values()
        if is_batch and len(parameters) > 1:
            raise DeclarationError("a batch argument is the only argument of a command")
        return cls([_parameter(each, hints.get(each.name)) for each in parameters[has_name:]], has_name, is_batch)

    def arity(self, words: int) -> int:
        """Return the arity as Redis defines it, with a name of some words: negative for a minimum."""
        required = words + sum(each.is_required for each in self.each)
        is_open = any(not each.is_required or each.is_repeated for each in self.each)
        return -required if is_open else required

    @cached_property
    def count_max(self) -> int | None:
        """The maximum number of arguments; None: no maximum."""
        return None if self.each and self.each[-1].is_repeated else len(self.each)

    @cached_property
    def needs_no_conversion(self) -> bool:
        """Whether no argument is converted."""
        return all(each.convert is None for each in self.each)

    def convert(self, arguments: Sequence[bytes]) -> list[Any]:
        """Return the converted arguments; their number must be valid. They are converted from left to right."""
        parameters = list(self.each)
        if parameters and parameters[-1].is_repeated:
            parameters += [parameters[-1]] * (len(arguments) - len(parameters))
        return [
            argument if parameter.convert is None else parameter.convert(argument)
            for parameter, argument in zip(parameters, arguments, strict=False)
        ]


def _parameter(declared: inspect.Parameter, hint: Any) -> Parameter:
    is_repeated = declared.kind is inspect.Parameter.VAR_POSITIONAL
    if declared.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
        raise DeclarationError(f"argument {declared.name!r} can only be given by name, and no request does that")
    if declared.default is not inspect.Parameter.empty and type(None) in get_args(hint):
        hint = next(each for each in get_args(hint) if each is not type(None))
    is_required = hint is OneOrMore if is_repeated else declared.default is inspect.Parameter.empty
    return Parameter(_converter(declared.name, hint), is_required, is_repeated)


def _converter(name: str, hint: Any) -> Convert | None:
    if hint is bytes or hint is OneOrMore or hint is BatchArgument:
        return None
    if hint is int:
        return integer
    if get_origin(hint) is Annotated and callable(get_args(hint)[1]):
        convert: Convert = get_args(hint)[1]
        return convert
    raise DeclarationError(f"argument {name!r} has a type without a converter: {hint!r}")


@dataclass(frozen=True)
class CommandHandler:
    """The function of a command. Calling it calls the function, with arguments that are already converted.

    Args:
        summary: None: that of the reference table.
        ours: The facts of a command that Redis does not have.
    """

    name: str
    body: Body
    parameters: Parameters
    summary: str | None = None
    ours: CommandSpec | None = None

    def __call__(self, *arguments: Any) -> Reply:
        return self.body(*arguments)

    @property
    def arity(self) -> int:
        """The arity of the signature."""
        return self.parameters.arity(1 + self.name.count("|"))


def command(name: str, ours: CommandSpec | None = None) -> Callable[[Body], CommandHandler]:
    """Declare a function as a command (`get`) or a subcommand (`client|id`).

    Args:
        ours: The facts of a command that Redis does not have, without arity and summary.
    """

    def declare(body: Body) -> CommandHandler:
        summary = (body.__doc__ or "").partition("\n")[0].strip()
        return CommandHandler(name, body, Parameters.of(body), summary, ours)

    return declare


@dataclass(frozen=True)
class WorkerQuery:
    """A query that a command sends to every process of the server; argument and response are JSON."""

    name: str
    respond: Respond


def worker_query(name: str) -> Callable[[Respond], WorkerQuery]:
    """Declare a function that computes a process' response to a query."""
    return partial(WorkerQuery, name)


def worker_queries_in(module: ModuleType) -> list[WorkerQuery]:
    """Return the queries that a module declares."""
    return [each for each in vars(module).values() if isinstance(each, WorkerQuery)]


def handlers_in(module: ModuleType) -> list[CommandHandler]:
    """Return the commands that a module declares, singly or in lists, in the module's order."""
    found: list[CommandHandler] = []
    for each in vars(module).values():
        if isinstance(each, CommandHandler):
            found.append(each)
        elif isinstance(each, list):
            found += [one for one in each if isinstance(one, CommandHandler)]
    return found


def check_count(declared: Parameters, name: str, request: Sequence[bytes]) -> None:
    """Raise GenericError for too many arguments. The arity has no maximum; in Redis each command checks that itself."""
    container, bar, _ = name.partition("|")
    if declared.count_max is not None and len(request) > declared.count_max + 1 + len(bar):
        raise wrong_subcommand(container, request[1]) if bar else wrong_arity(name)
