"""Finds the columns that a state names: a column of a DataFrame, or a field of a struct, such as `window.start`.

Runs on the driver. A column whose own name is `window.start` comes before the field of that path.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

NEAREST_MAX = 3


def column_of(df: DataFrame, name: str) -> Column:
    """Return a column, or a field of a struct, by its exact name. A column's own name may contain dots."""
    return F.col(".".join(map(_quoted, _path_of(df.schema, name) or [name])))


def type_of(df: DataFrame, name: str) -> T.DataType:
    """Return the type of a column or field; KeyError if there is none of that name."""
    path = _path_of(df.schema, name)
    if path is None:
        raise KeyError(name)
    return reduce(lambda kind, part: kind[part].dataType, path, df.schema)  # type: ignore[arg-type, return-value]


def has_column(df: DataFrame, name: str) -> bool:
    """Return whether a DataFrame has a column, or a field of a struct, of a name."""
    return _path_of(df.schema, name) is not None


def is_ambiguous(df: DataFrame, name: str) -> bool:
    """Return whether several columns have the name of a column, or of the struct that a field is in."""
    path = _path_of(df.schema, name) or [name]
    return df.columns.count(path[0]) > 1


def explain_missing(df: DataFrame, name: str) -> str:
    """Return the end of an error about a missing column: the nearest names, and the schema as a tree."""
    names = list(_names(df.schema))
    by_lower_case = {each.lower(): each for each in reversed(names)}
    by_last_part = {each.rpartition(".")[2].lower(): each for each in reversed(names)}
    nearest = [
        by_lower_case.get(found) or by_last_part[found]
        for found in get_close_matches(name.lower(), {**by_lower_case, **by_last_part}, NEAREST_MAX)
    ]
    suggestion = f"did you mean {' or '.join(map(repr, dict.fromkeys(nearest)))}? " if nearest else ""
    return f"{suggestion}Its columns:\n" + "\n".join(_tree(df.schema))


def _path_of(schema: T.StructType, name: str) -> list[str] | None:
    """Return the path of names to a column or field; of several paths, the one with the longest first name."""
    if name in schema.names:
        return [name]
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        first = ".".join(parts[:count])
        if first in schema.names and isinstance(kind := schema[first].dataType, T.StructType):
            rest = _path_of(kind, ".".join(parts[count:]))
            if rest is not None:
                return [first, *rest]
    return None


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _names(schema: T.StructType, prefix: str = "") -> Iterator[str]:
    """Iterate over the names of all columns and fields."""
    for each in schema:
        yield prefix + each.name
        if isinstance(each.dataType, T.StructType):
            yield from _names(each.dataType, f"{prefix}{each.name}.")


def _tree(schema: T.StructType, indent: str = "  ") -> Iterator[str]:
    """Iterate over the lines of a schema as a tree, with the type of each column and field."""
    for each in schema:
        if isinstance(each.dataType, T.StructType):
            yield f"{indent}{each.name}: struct"
            yield from _tree(each.dataType, indent + "  ")
        else:
            yield f"{indent}{each.name}: {each.dataType.simpleString()}"
