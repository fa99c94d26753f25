"""SQL expressions over the columns of a state, without Spark: a small part of Spark SQL, with Spark's results.

    column, `column`, 12, 'text', NULL, and 1.5, which is a double, as Spark's 1.5D
    + - * / with parentheses     of integers and floats; `/` gives a double, and null where the divisor is 0
    coalesce(..), concat(..), concat_ws('sep', ..), lower(..), upper(..), abs(..)
    cast(.. AS type)             see `casts`
    year(..), date_format(..)    and other functions of times: see `time_functions`

Names of columns are case-sensitive. Anything else is a DescriptorError that points to Spark's reader.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from state_backend.attach.casts import DECIMAL, DECIMAL_DEFAULT, DECIMAL_DIGITS_MAX, TYPES, cast
from state_backend.attach.casts import text as text_of
from state_backend.attach.time_functions import FUNCTIONS as TIME_FUNCTIONS
from state_backend.attach.time_functions import formatted_as, truncated_to
from state_backend.codec.column_text import readable_text
from state_backend.codec.json_text import join_present
from state_backend.model.errors import DescriptorError

Columns = Mapping[str, pa.Array]
Evaluate = Callable[[Columns, int], pa.Array]

TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+\.\d+|\d+)|'(?P<text>(?:[^'\\]|'')*)'|`(?P<quoted>[^`]+)`|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<sign>[-+*/(),]))"
)
HINT = "write an expression of docs/attach.md, or use Spark's reader: reader='spark' (--reader spark)"


@dataclass(frozen=True)
class Expression:
    """A parsed expression.

    Args:
        names: The columns that it uses.
    """

    text: str
    names: frozenset[str]
    evaluate: Evaluate = field(compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the text, because functions cannot be pickled."""
        return parse, (self.text,)

    def kind(self, kinds: Mapping[str, pa.DataType]) -> pa.DataType:
        """Return the type of the results, given the types of the columns; DescriptorError for types that do not fit."""
        return self.values({name: pa.nulls(0, kind) for name, kind in kinds.items()}, 0).type

    def values(self, columns: Columns, rows: int) -> pa.Array:
        """Return the results for some rows."""
        try:
            return self.evaluate(columns, rows)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise DescriptorError(f"columns= cannot compute {self.text!r}: {error}; {HINT}") from None


def parse(text: str) -> Expression:
    """Return the expression in a text; DescriptorError if sparkis cannot compute it."""
    parser = _Parser(text)
    evaluate = parser.sum()
    parser.finish()
    return Expression(text, frozenset(parser.names), evaluate)


class _Parser:
    """A recursive-descent parser that makes functions over columns."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self.names: set[str] = set()

    def finish(self) -> None:
        if self._text[self._at :].strip():
            raise self._error()

    def sum(self) -> Evaluate:
        left = self._product()
        while sign := self._sign("+", "-"):
            left = _arithmetic(sign, left, self._product())
        return left

    def _product(self) -> Evaluate:
        left = self._factor()
        while sign := self._sign("*", "/"):
            left = _arithmetic(sign, left, self._factor())
        return left

    def _factor(self) -> Evaluate:
        if self._sign("-"):
            return _arithmetic("-", _constant(0), self._factor())
        if self._sign("("):
            inner = self.sum()
            self._expect(")")
            return inner
        token = self._take()
        if token["number"] is not None:
            return _constant(float(token["number"]) if "." in token["number"] else int(token["number"]))
        if token["text"] is not None:
            return _constant(token["text"].replace("''", "'"))
        if token["quoted"] is not None:
            return self._column(token["quoted"])
        name = token["name"]
        if name is None:
            raise self._error()
        if name.lower() == "null":
            return lambda columns, rows: pa.nulls(rows)
        if self._sign("("):
            return self._call(name.lower())
        return self._column(name)

    def _call(self, name: str) -> Evaluate:
        if name == "cast":
            argument = self.sum()
            if self._word() != "as":
                raise self._error()
            kind = self._type()
            self._expect(")")
            return lambda columns, rows: cast(argument(columns, rows), kind)
        if name == "date_trunc":
            change = truncated_to(self._literal())
            self._expect(",")
            return self._changed(self.sum(), change)
        if name == "date_format":
            argument = self.sum()
            self._expect(",")
            return self._changed(argument, formatted_as(self._literal()))
        function = FUNCTIONS.get(name)
        if function is None:
            raise self._error()
        arguments = [self.sum()]
        while self._sign(","):
            arguments.append(self.sum())
        self._expect(")")
        return lambda columns, rows: function([each(columns, rows) for each in arguments])

    def _changed(self, argument: Evaluate, change: Callable[[pa.Array], pa.Array] | None) -> Evaluate:
        """Return the function that changes an argument; an error if its unit or its pattern is not known."""
        if change is None:
            raise self._error()
        self._expect(")")
        return lambda columns, rows: change(argument(columns, rows))

    def _type(self) -> pa.DataType:
        name = self._word()
        if name in TYPES:
            return TYPES[name]
        if name != DECIMAL:
            raise self._error()
        numbers = DECIMAL_DEFAULT
        if self._sign("("):
            numbers = (self._integer(), self._integer() if self._sign(",") else 0)
            self._expect(")")
        if not 0 < numbers[0] <= DECIMAL_DIGITS_MAX or numbers[1] > numbers[0]:
            raise self._error()
        return pa.decimal128(*numbers)

    def _integer(self) -> int:
        token = self._take()["number"] or ""
        if not token.isdigit():
            raise self._error()
        return int(token)

    def _literal(self) -> str:
        token = self._take()["text"]
        if token is None:
            raise self._error()
        return token.replace("''", "'")

    def _column(self, name: str) -> Evaluate:
        self.names.add(name)
        return lambda columns, rows: columns[name]

    def _take(self) -> re.Match[str]:
        found = TOKEN.match(self._text, self._at)
        if found is None:
            raise self._error()
        self._at = found.end()
        return found

    def _word(self) -> str:
        return (self._take()["name"] or "").lower()

    def _sign(self, *signs: str) -> str:
        found = TOKEN.match(self._text, self._at)
        if found is None or found["sign"] not in signs:
            return ""
        self._at = found.end()
        return str(found["sign"])

    def _expect(self, sign: str) -> None:
        if not self._sign(sign):
            raise self._error()

    def _error(self) -> DescriptorError:
        return DescriptorError(
            f"columns= has the expression {self._text!r}, which sparkis does not read from {self._text[self._at :]!r} "
            f"on; {HINT}"
        )


def _constant(value: float | str) -> Evaluate:
    return lambda columns, rows: pa.repeat(pa.scalar(value), rows)


def _arithmetic(sign: str, left: Evaluate, right: Evaluate) -> Evaluate:
    def evaluate(columns: Columns, rows: int) -> pa.Array:
        one, other = left(columns, rows), right(columns, rows)
        for each in (one, other):
            if not (pa.types.is_integer(each.type) or pa.types.is_floating(each.type)):
                raise TypeError(f"{sign} takes integers and floats, not {each.type}; cast it to double")
        if sign == "/":
            one, other = one.cast(pa.float64()), other.cast(pa.float64())
            divisor = pc.if_else(pc.equal(other, 0.0), pa.scalar(None, pa.float64()), other)
            return pc.divide(one, divisor)
        return {"+": pc.add_checked, "-": pc.subtract_checked, "*": pc.multiply_checked}[sign](one, other)

    return evaluate


def _coalesce(arguments: Sequence[pa.Array]) -> pa.Array:
    kinds = {argument.type for argument in arguments if not pa.types.is_null(argument.type)}
    if len(kinds) == 2 and all(pa.types.is_integer(kind) for kind in kinds):
        kinds = {pa.int64()}
    if len(kinds) > 1:
        raise TypeError(f"coalesce takes values of one type, not of {', '.join(sorted(map(str, kinds)))}")
    kind = next(iter(kinds), pa.null())
    return pc.coalesce(*(argument.cast(kind) for argument in arguments))


def _concat(arguments: Sequence[pa.Array]) -> pa.Array:
    return pc.binary_join_element_wise(*map(text_of, arguments), "")


def _concat_ws(arguments: Sequence[pa.Array]) -> pa.Array:
    separator, *texts = map(text_of, arguments)
    if not texts or len(separator.unique()) > 1 or separator.null_count:
        raise TypeError("concat_ws takes a text as separator, and other texts")
    return join_present(texts, separator[0].as_py()) if len(separator) else separator


def _of_one(function: Callable[[pa.Array], pa.Array]) -> Callable[[Sequence[pa.Array]], pa.Array]:
    def call(arguments: Sequence[pa.Array]) -> pa.Array:
        (argument,) = arguments
        return function(argument)

    return call


FUNCTIONS: Mapping[str, Callable[[Sequence[pa.Array]], pa.Array]] = {
    **TIME_FUNCTIONS,
    "coalesce": _coalesce,
    "ifnull": _coalesce,
    "nvl": _coalesce,
    "concat": _concat,
    "concat_ws": _concat_ws,
    "lower": _of_one(lambda values: pc.utf8_lower(readable_text(values))),
    "upper": _of_one(lambda values: pc.utf8_upper(readable_text(values))),
    "abs": _of_one(lambda values: pc.abs_checked(values)),
}
