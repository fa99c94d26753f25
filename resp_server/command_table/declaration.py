"""How a command is declared: a decorator on its function, and what the function's signature says.

    @command("getrange")
    def getrange(context: CommandContext, key: bytes, start: int, end: int) -> bytes:
        '''Returns a substring of the string stored at a key.'''

Parameters after `context` are the command's arguments, in order: `bytes` as sent, `int` a 64-bit number, or
`Annotated[type, convert]` with a function that takes bytes and raises ReplyError. A default makes one optional, `*rest`
takes any number, `*rest: OneOrMore` at least one. A first parameter of `NameAsTyped` is the command's name. Arity,
conversion and the error texts follow from that. A function whose one argument is a `Column` is given that argument of
several requests, and returns the replies to the first of them, to one at least. The first docstring line is the summary
in COMMAND DOCS. Everything else about a command of Redis is in the reference table; a command of ours gives it to the
decorator.

The function returns plain Python (see `protocol.replies`) or raises ReplyError. What it needs from the other processes
that serve the same port it asks with `ServerContext.gather`, by a `@question("...")` that each of them answers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import ModuleType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from resp_server.command_table.facts import Facts
from resp_server.protocol.errors import not_an_integer, wrong_arity, wrong_subcommand
from resp_server.protocol.replies import Reply

Body = Callable[..., Reply]
Convert = Callable[[bytes], Any]
# Called with the process's `ServerContext` and the argument of the question.
Answer = Callable[[Any, Any], Any]

INTEGER = re.compile(rb"0|-?[1-9][0-9]{0,18}")
INTEGER_MAX = 2**63 - 1


class DeclarationError(Exception):
    """A command is declared in a way that cannot work; raised at start-up."""


class _AtLeastOne:
    """Marks `*rest` that may not be empty."""


OneOrMore = Annotated[bytes, _AtLeastOne]


class _OfEachRequest:
    """Marks an argument of each of several requests."""


Column = Annotated[Sequence[bytes], _OfEachRequest]


class _Name:
    """Marks the parameter that is the command's name as the client typed it."""


NameAsTyped = Annotated[bytes, _Name]


def is_integer(word: bytes) -> bool:
    """Tell whether Redis' string2ll reads a 64-bit number: no plus sign, no leading zero, no space."""
    return INTEGER.fullmatch(word) is not None and -INTEGER_MAX - 1 <= int(word) <= INTEGER_MAX


def integer(word: bytes) -> int:
    """Read a 64-bit number; PlainError if it is none."""
    if not is_integer(word):
        raise not_an_integer()
    return int(word)


@dataclass(frozen=True)
class Parameter:
    """One argument, or one run of them."""

    convert: Convert | None = None
    is_required: bool = True
    is_repeated: bool = False


@dataclass(frozen=True)
class Parameters:
    """A command's arguments: how many, and how each is read."""

    each: Sequence[Parameter]
    has_name: bool = False
    is_column: bool = False

    @classmethod
    def of(cls, body: Body) -> Parameters:
        """Read a function's signature; DeclarationError if it says what no command can mean."""
        hints = get_type_hints(body, include_extras=True)
        given = list(inspect.signature(body).parameters.values())[1:]
        has_name = bool(given) and hints.get(given[0].name) is NameAsTyped
        is_column = Column in hints.values()
        if is_column and len(given) > 1:
            raise DeclarationError("a column is the only argument of a command")
        return cls([_parameter(each, hints.get(each.name)) for each in given[has_name:]], has_name, is_column)

    def arity(self, words: int) -> int:
        """Return Redis' arity for a name of so many words: exact, or negative for at least."""
        required = words + sum(each.is_required for each in self.each)
        is_open = any(not each.is_required or each.is_repeated for each in self.each)
        return -required if is_open else required

    @cached_property
    def count_max(self) -> int | None:
        """The number of arguments that there may be, or None if any."""
        return None if self.each and self.each[-1].is_repeated else len(self.each)

    @cached_property
    def is_plain(self) -> bool:
        """Tell whether all arguments are taken as they are sent."""
        return all(each.convert is None for each in self.each)

    def convert(self, words: Sequence[bytes]) -> list[Any]:
        """Read arguments, whose number is right, from left to right."""
        each = list(self.each)
        if each and each[-1].is_repeated:
            each += [each[-1]] * (len(words) - len(each))
        return [word if as_.convert is None else as_.convert(word) for as_, word in zip(each, words, strict=False)]


def _parameter(given: inspect.Parameter, hint: Any) -> Parameter:
    is_repeated = given.kind is inspect.Parameter.VAR_POSITIONAL
    if given.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
        raise DeclarationError(f"argument {given.name!r} can only be given by name, and no request does that")
    if given.default is not inspect.Parameter.empty and type(None) in get_args(hint):
        hint = next(each for each in get_args(hint) if each is not type(None))
    is_required = hint is OneOrMore if is_repeated else given.default is inspect.Parameter.empty
    return Parameter(_converter(given.name, hint), is_required, is_repeated)


def _converter(name: str, hint: Any) -> Convert | None:
    if hint is bytes or hint is OneOrMore or hint is Column:
        return None
    if hint is int:
        return integer
    if get_origin(hint) is Annotated and callable(get_args(hint)[1]):
        convert: Convert = get_args(hint)[1]
        return convert
    raise DeclarationError(f"argument {name!r} is of a type that no text is turned into: {hint!r}")


@dataclass(frozen=True)
class Declaration:
    """A command as its function declares it. Calling it calls the function, with arguments converted.

    summary: None leaves it to the reference table; own: the facts of a command that Redis does not have.
    """

    name: str
    body: Body
    parameters: Parameters
    summary: str | None = None
    own: Facts | None = None

    def __call__(self, *arguments: Any) -> Reply:
        return self.body(*arguments)

    @property
    def arity(self) -> int:
        """The arity that follows from the signature."""
        return self.parameters.arity(1 + self.name.count("|"))


def command(name: str, own: Facts | None = None) -> Callable[[Body], Declaration]:
    """Declare a function to be the body of a command (`get`) or of a subcommand (`client|id`).

    own: the facts of a command that Redis does not have, without arity and summary.
    """

    def declare(body: Body) -> Declaration:
        summary = (body.__doc__ or "").partition("\n")[0].strip()
        return Declaration(name, body, Parameters.of(body), summary, own)

    return declare


@dataclass(frozen=True)
class Question:
    """What every process of a server can be asked on behalf of a command; argument and answer are JSON."""

    name: str
    answer: Answer


def question(name: str) -> Callable[[Answer], Question]:
    """Declare a function to be what a process answers when it is asked this."""
    return partial(Question, name)


def questions_in(module: ModuleType) -> list[Question]:
    """Return the questions that a module declares."""
    return [each for each in vars(module).values() if isinstance(each, Question)]


def declared_in(module: ModuleType) -> list[Declaration]:
    """Return the commands that a module declares, in its order; single ones or lists of them."""
    found: list[Declaration] = []
    for each in vars(module).values():
        if isinstance(each, Declaration):
            found.append(each)
        elif isinstance(each, list):
            found += [one for one in each if isinstance(one, Declaration)]
    return found


def check_count(declared: Parameters, name: str, request: Sequence[bytes]) -> None:
    """Refuse more arguments than an optional one allows; Redis' arity cannot say that, its commands do."""
    container, bar, _ = name.partition("|")
    if declared.count_max is not None and len(request) > declared.count_max + 1 + len(bar):
        raise wrong_subcommand(container, request[1]) if bar else wrong_arity(name)
