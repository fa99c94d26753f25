"""Reducing states: how the values of a micro-batch are folded into the stored value of a key, or of a field.

A change with `Op.FOLD` has the reduced value of all rows of one epoch. A store folds it into the stored value, and
writes the result like a PUT; so readers, snapshots and expiry know nothing of FOLDs. Both values are texts as clients
see them (see `state_backend.codec.row_encoding`), and the result is exact:

    sum, count   integers of any size; decimals with the scale of their column; floats as doubles, the shortest text
    min, max     numbers by their size, NaN above all others; texts and bytes by their bytes (for texts: by code
                 points); false below true; dates and times by time
    last         needs no folding: its changes are PUTs
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from decimal import MAX_PREC, Context, Decimal, InvalidOperation
from functools import lru_cache
from typing import Any, NamedTuple

from state_backend.codec import packed_map
from state_backend.model.descriptor import Kind, Reduce, StateDescriptor
from state_backend.model.errors import ChangeError, DescriptorError, StoreError
from state_backend.model.records import Change, Op

EXACT = Context(prec=MAX_PREC, traps=[InvalidOperation])

SortKey = Callable[[bytes], Any]


class Reduction(NamedTuple):
    """How a state's values are folded.

    fold(old, new): returns the result as text; ValueError or InvalidOperation for a text of another type.

    Args:
        pattern: Every value matches it.
    """

    fold: Callable[[bytes, bytes], bytes]
    pattern: re.Pattern[bytes]


class _ColumnType(NamedTuple):
    """A group of column types with the same folding.

    Args:
        pattern: Every value matches it.
        sort_key: For `min` and `max`.
        add: None if values cannot be added.
    """

    pattern: bytes
    sort_key: SortKey
    add: Callable[[bytes, bytes], bytes] | None


def float_text(number: float) -> bytes:
    """Return the shortest text that stands for a float; without an exponent from 1e-7 up to 1e21."""
    text = repr(number)
    if "e" in text:
        if 1e-7 <= abs(number) < 1e21:
            text = format(Decimal(text), "f")
        else:
            digits, _, exponent = text.partition("e")
            text = f"{digits}e{int(exponent):+d}"
    return text.removesuffix(".0").encode()


def _add_integers(old: bytes, new: bytes) -> bytes:
    return b"%d" % (int(old) + int(new))


def _decimal(text: bytes) -> Decimal:
    return Decimal(text.decode())


def _add_decimals(old: bytes, new: bytes) -> bytes:
    return format(EXACT.add(_decimal(old), _decimal(new)), "f").encode()


def _add_floats(old: bytes, new: bytes) -> bytes:
    return float_text(float(old) + float(new))


def _float_key(text: bytes) -> tuple[bool, float]:
    number = float(text)
    return number != number, number


def _time_key(text: bytes) -> tuple[int, bytes]:
    """Return a sort key of a date or time: its year may have a sign and more than four digits."""
    year_end = text.index(b"-", 1)
    return int(text[:year_end]), text[year_end:].removesuffix(b"Z")


INTEGER = _ColumnType(rb"-?[0-9]{1,4000}", int, _add_integers)
DECIMAL = _ColumnType(rb"-?[0-9]{1,4000}(\.[0-9]+)?", _decimal, _add_decimals)
FLOAT = _ColumnType(rb"-?([0-9]{1,400}(\.[0-9]+)?(e[+-][0-9]{1,3})?|inf)|nan", _float_key, _add_floats)
TEXT = _ColumnType(rb".*", bytes, None)
TIME = _ColumnType(rb"[+-]?[0-9]{4,7}-[0-9]{2}-[0-9]{2}(T[0-9:]{8}(\.[0-9]{1,6})?Z?)?", _time_key, None)
# By the first word of a column's type, as Spark writes it.
TYPES: Mapping[str, _ColumnType] = {
    **dict.fromkeys(("tinyint", "smallint", "int", "bigint"), INTEGER),
    "decimal": DECIMAL,
    **dict.fromkeys(("float", "double"), FLOAT),
    **dict.fromkeys(("string", "varchar", "char", "binary", "boolean"), TEXT),
    **dict.fromkeys(("date", "timestamp", "timestamp_ntz"), TIME),
}


def reduction_of(state: StateDescriptor) -> Reduction | None:
    """Return how a state's changes are folded; None for a state without FOLDs. DescriptorError for a wrong type."""
    if state.reduce in (None, Reduce.LAST):
        return None
    if state.reduce is Reduce.COUNT:
        return _reduction(Reduce.SUM, INTEGER)
    column = state.value[0]
    if column not in state.columns:
        raise DescriptorError(
            f"state {state.name!r}: reduce={state.reduce.value!r} needs the type of the column {column!r}: "
            f"columns={{{column!r}: 'bigint'}}, say"
        )
    name = state.columns[column]
    column_type = TYPES.get(re.match(r"\w*", name)[0])  # type: ignore[index]  # always matches
    if column_type is None or (state.reduce is Reduce.SUM and column_type.add is None):
        raise DescriptorError(
            f"state {state.name!r}: reduce={state.reduce.value!r} cannot take the column {column!r}, whose type is "
            f"{name}; {_remedy(state.reduce)}"
        )
    return _reduction(state.reduce, column_type)


def _remedy(reduce: Reduce) -> str:
    if reduce is Reduce.SUM:
        return "only numbers have a sum: cast the column, or use reduce='count'"
    return "only numbers, texts, bytes, booleans, dates and times have an order: cast the column"


@lru_cache
def _reduction(reduce: Reduce, column_type: _ColumnType) -> Reduction:
    pattern = re.compile(column_type.pattern, re.DOTALL)
    if reduce is Reduce.SUM:
        assert column_type.add is not None
        return Reduction(column_type.add, pattern)
    key = column_type.sort_key

    def least(old: bytes, new: bytes) -> bytes:
        return new if key(new) < key(old) else old

    def greatest(old: bytes, new: bytes) -> bytes:
        return new if key(old) < key(new) else old

    return Reduction(least if reduce is Reduce.MIN else greatest, pattern)


def folded(reduction: Reduction | None, change: Change, old: bytes | None) -> bytes:
    """Return the result of a FOLD.

    Args:
        old: The value of its key, or field; None if there is none.
    """
    if reduction is None or change.value is None:
        raise StoreError(
            f"a change folds a value into the key {change.key[:100]!r}, but its state {change.state!r} has no reduce=; "
            f"a newer version wrote the log: upgrade sparkis"
        )
    if old is None:
        return change.value
    try:
        return reduction.fold(old, change.value)
    except (ValueError, InvalidOperation):
        raise StoreError(
            f"state {change.state!r}: the key {change.key[:100]!r} has the value {old[:100]!r}, into which "
            f"{change.value[:100]!r} cannot be folded; write values of one type into a reducing state"
        ) from None


def check_change(change: Change, state: StateDescriptor, reduction: Reduction | None) -> None:
    """Raise ChangeError for a FOLD into a state without `reduce`, or for a value that its state cannot reduce."""
    if change.op == Op.FOLD and (
        reduction is None or change.value is None or (change.field is None) != (state.kind is Kind.VALUE)
    ):
        raise ChangeError(
            f"state {state.name!r}: a FOLD at the key {change.key[:100]!r} needs a state with reduce=, a value and, "
            f"if the state has field=, a field"
        )
    if reduction is not None and change.op in (Op.PUT, Op.FOLD):
        for value in _values(change, state):
            if not reduction.pattern.fullmatch(value):
                raise ChangeError(
                    f"state {state.name!r}: reduce={str(state.reduce)!r} cannot take the value {value[:100]!r} of the "
                    f"key {change.key[:100]!r}; write it as sparkis does (docs/states.md)"
                )


def _values(change: Change, state: StateDescriptor) -> Iterator[bytes]:
    if state.kind is Kind.MAP and change.field is None:
        yield from (value for _, value in packed_map.pairs(change.value or packed_map.EMPTY))
    else:
        yield change.value or b""
