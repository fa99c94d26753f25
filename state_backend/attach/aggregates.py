"""The aggregate functions of a query, and the buffers in which Spark keeps their state.

    avg(price)                        a function as the query has it
    collect_set(tag::string)          with the type of its argument, where the buffers do not tell it: here, and for
                                      sums and averages of decimals, which Spark may keep as integers and floats
    percentile(price::double, 0.9)    with its further arguments

A checkpoint has the names and types of the buffers, but not the functions: `sum` and `count` may be an `avg`, or a
`sum` and a `count`. So the functions are matched to the buffers in order. A function that matches in several
places is an error.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from state_backend.attach import evaluation, serialized
from state_backend.attach.distinct_counts import precision_of
from state_backend.attach.evaluation import Evaluate, FunctionCall
from state_backend.checkpoint.spark_types import parse_type_name, type_name
from state_backend.model.errors import DescriptorError

logger = logging.getLogger("sparkis.attach")

CALL = re.compile(r"\s*([A-Za-z_]\w*)\s*\((.*)\)\s*", re.DOTALL)
OPENING, CLOSING = "([<", ")]>"
MOMENTS = ("n", "avg", "m2", "m3", "m4")
PAIRS = ("n", "xAvg", "yAvg", "ck", "xMk", "yMk")
# Buffers that only continue a function. If one of them follows a match, the match is a part of a longer function, so it
# does not count.
FURTHER = ("m2", "m3", "m4", "ck", "xMk", "yMk")


@dataclass(frozen=True)
class Function:
    """An aggregate function.

    Args:
        buffers: Their names in Spark.
        optional: One more at the end, which some types add.
    """

    evaluate: Evaluate
    buffers: tuple[str, ...]
    optional: str | None = None

    def width(self, names: Sequence[str], at: int) -> int:
        """Return how many buffers, from a position on, belong to the function; 0 if it does not match there."""
        end = at + len(self.buffers)
        if tuple(names[at:end]) != self.buffers:
            return 0
        if self.evaluate is evaluation.approximate_count:
            end = at
            while end < len(names) and names[end] == f"MS[{end - at}]":
                end += 1
        following = names[end] if end < len(names) else None
        if following in FURTHER:
            return 0
        return end - at + (following is not None and following == self.optional)


def _named(names: str, function: Function) -> dict[str, Function]:
    return dict.fromkeys(names.split(), function)


FUNCTIONS: Mapping[str, Function] = {
    **_named("count count_if regr_count", Function(evaluation.value, ("count",))),
    **_named("sum try_sum", Function(evaluation.total, ("sum",), "isEmpty")),
    **_named("avg mean try_avg regr_avgx regr_avgy", Function(evaluation.mean, ("sum", "count"))),
    **_named("min bool_and every", Function(evaluation.value, ("min",))),
    **_named("max bool_or some any", Function(evaluation.value, ("max",))),
    **_named("first first_value any_value", Function(evaluation.value, ("first", "valueSet"))),
    **_named("last last_value", Function(evaluation.value, ("last", "valueSet"))),
    **_named("max_by min_by", Function(evaluation.value, ("valueWithExtremumOrdering", "extremumOrdering"))),
    **{name: Function(evaluation.value, (name,)) for name in ("bit_and", "bit_or", "bit_xor", "product")},
    **_named("stddev std stddev_samp", Function(evaluation.deviation, MOMENTS[:3])),
    **_named("stddev_pop", Function(evaluation.deviation_pop, MOMENTS[:3])),
    **_named("variance var_samp", Function(evaluation.variance, MOMENTS[:3])),
    **_named("var_pop", Function(evaluation.variance_pop, MOMENTS[:3])),
    **_named("skewness", Function(evaluation.skewness, MOMENTS[:4])),
    **_named("kurtosis", Function(evaluation.kurtosis, MOMENTS)),
    **_named("covar_samp", Function(evaluation.covariance, PAIRS[:4])),
    **_named("covar_pop", Function(evaluation.covariance_pop, PAIRS[:4])),
    **_named("corr", Function(evaluation.correlation, PAIRS)),
    **_named("approx_count_distinct", Function(evaluation.approximate_count, ("MS[0]",))),
    **_named("collect_list collect_set array_agg", Function(serialized.collected, ("buf",))),
    **_named("percentile percentile_cont median", Function(serialized.percentile, ("buf",))),
    **_named("percentile_approx approx_percentile", Function(serialized.approximate_percentile, ("buf",))),
}
BYTES = "its buffer is bytes whose form is Spark's own"
REFUSED: Mapping[str, str] = {
    "mode": "which of several values with the same count it shows depends on the order in Spark's memory",
    "percentile_disc": "versions of Spark compute it differently",
    **dict.fromkeys(
        ("regr_slope", "regr_intercept", "regr_r2", "regr_sxx", "regr_sxy", "regr_syy"), "sparkis lacks it"
    ),
    **dict.fromkeys(("histogram_numeric", "count_min_sketch", "listagg", "string_agg", "hll_sketch_agg"), BYTES),
    **dict.fromkeys(("hll_union_agg", "bitmap_construct_agg", "bitmap_or_agg", "approx_top_k", "try_reflect"), BYTES),
}
# Functions whose buffers no other function has, so that a checkpoint alone is enough to compute the results.
EVIDENT = ("approx_count_distinct", "first", "last")


@dataclass(frozen=True)
class PlannedFunction:
    """A function in the plan of a query.

    Args:
        first: The position of its first buffer.
    """

    name: str
    text: str
    first: int


@dataclass(frozen=True)
class Aggregate:
    """A function of a query.

    Args:
        first: The position of its first buffer.
        width: The number of its buffers.
    """

    text: str
    call: FunctionCall
    first: int = 0
    width: int = 0

    @property
    def end(self) -> int:
        """The position after its last buffer."""
        return self.first + self.width

    def evaluate(self, buffers: Sequence[pa.Array]) -> pa.Array:
        """Return the results of some rows; DescriptorError if the buffers are not those of the function."""
        try:
            return FUNCTIONS[self.call.name].evaluate(buffers, self.call)
        except (TypeError, ValueError, pa.ArrowException) as error:
            raise DescriptorError(
                f"columns= has {self.text!r}, which cannot be made of the buffers from _{self.first} on: {error}"
            ) from None

    def evaluate_present(self, buffers: Sequence[pa.Array], is_present: pa.Array) -> pa.Array:
        """Return the results of some rows; null for those that are not present, because they delete."""
        present = is_present.to_numpy(zero_copy_only=False)
        if present.all():
            return self.evaluate(buffers)
        found = self.evaluate([buffer.filter(is_present) for buffer in buffers])
        return found.take(pa.array(np.cumsum(present) - 1, pa.int64(), mask=~present))


def parse_aggregate(text: str) -> FunctionCall | None:
    """Parse a call of an aggregate function; None for any other expression.

    DescriptorError: sparkis cannot compute the function, or does not know the declared type.
    """
    found = CALL.fullmatch(text)
    name = "" if found is None else found[1].lower()
    if found is None or name not in {*FUNCTIONS, *REFUSED} or not _is_balanced(found[2]):
        return None
    if name in REFUSED:
        raise DescriptorError(f"columns= has {text!r}, which sparkis cannot compute: {REFUSED[name]}")
    first, *others = (part.strip() for part in _parts(found[2]))
    _, colons, declared = first.rpartition("::")
    return FunctionCall(name, parse_type_name(declared.strip()) if colons else None, tuple(others))


def match_buffers(calls: Mapping[str, FunctionCall], buffers: Sequence[pa.Field], source: str) -> dict[str, Aggregate]:
    """Match the functions of a query to its buffers.

    DescriptorError: the functions do not match the buffers, or match them in several ways.

    Args:
        calls: The calls by their texts, in the query's order.
    """
    names = [buffer.name for buffer in buffers]
    texts = list(calls)
    functions = [FUNCTIONS[call.name] for call in calls.values()]
    earliest = _earliest(functions, names)
    if earliest is None or len(earliest) < len(texts):
        missing = texts[len(earliest or [])]
        raise DescriptorError(
            f"{source}: columns= has {missing!r}, and after those before it there are no buffers for it; give the "
            f"functions in the order of the query. The buffers are {_shown(buffers)}"
        )
    latest = _latest(functions, names)
    for text, early, late in zip(texts, earliest, latest, strict=True):
        if early != late:
            raise DescriptorError(
                f"{source}: columns= has {text!r}, and it may be made of the buffers from _{early} or from _{late} on; "
                f"give all functions of the query, in its order. The buffers are {_shown(buffers)}"
            )
    return {
        text: Aggregate(text, calls[text], at, function.width(names, at))
        for text, at, function in zip(texts, earliest, functions, strict=True)
    }


def planned_of(
    aggregations: Mapping[int, Sequence[pa.Field]], functions: Sequence[Sequence[PlannedFunction]]
) -> dict[int, Sequence[PlannedFunction]]:
    """Return the functions of a query's plan by the numbers of their operators; none if they do not fit the buffers.

    Args:
        aggregations: The buffers by the numbers of the operators.
        functions: The functions of each aggregation, in the same order.
    """
    if not functions:
        return {}
    try:
        if len(aggregations) != len(functions):
            raise DescriptorError(f"the plan has {len(functions)} aggregations, the checkpoint {len(aggregations)}")
        found = dict(zip(sorted(aggregations), functions, strict=True))
        for operator, each in found.items():
            results_of(aggregations[operator], each, ())
    except DescriptorError as error:
        logger.warning("the buffers of aggregate functions are served as they are: %s", error)
        return {}
    return found


def results_of(
    buffers: Sequence[pa.Field], planned: Sequence[PlannedFunction] | None, taken: Collection[str]
) -> dict[str, Aggregate]:
    """Return the functions of a state by the names of their results: those of the plan, or else the evident ones.

    DescriptorError: the functions do not fit.

    Args:
        taken: The names of the key's columns, which no result may have.
    """
    if planned is None:
        functions = list(_evident(buffers))
        names = [function.text for function in functions]
    else:
        functions = [_planned(each, buffers) for each in planned]
        names = [each.name for each in planned]
    found: dict[str, Aggregate] = {}
    for name, each in zip(names, functions, strict=True):
        is_free = names.count(name) == 1 and name not in taken
        # The name if it is not free: without a plan, that of the first buffer; with a plan, the function's text.
        found[name if is_free else f"_{each.first}" if planned is None else each.text] = each
    return found


def of_buffers(
    named: Mapping[str, Aggregate], others: Mapping[str, Aggregate], buffers: Sequence[pa.Field]
) -> tuple[dict[str, range], dict[str, range]]:
    """Return the buffers of each function that `columns` names, and of all other columns that are made of buffers."""
    by_name = {name: range(index, index + 1) for index, each in enumerate(buffers) for name in (each.name, f"_{index}")}
    return (
        {name: range(each.first, each.end) for name, each in named.items()},
        by_name | {name: range(each.first, each.end) for name, each in others.items()},
    )


def default_columns(
    raw: Sequence[Sequence[str]], results: Mapping[str, Aggregate], is_buffer: Sequence[bool], *, is_planned: bool
) -> tuple[str, ...]:
    """Return the default columns of the value: the results, and the buffers that belong to none of them.

    Args:
        raw: The default columns of each field of the value.
        is_buffer: Whether each field is of a buffer, by field.
        is_planned: The plan is known, so buffers without a result are left out: readers cannot use them.
    """
    covered = {index for each in results.values() for index in range(each.first, each.end)}
    names = {each.first: name for name, each in results.items()}
    found: list[str] = []
    for index, default in enumerate(raw):
        if index in names:
            found.append(names[index])
        elif index not in covered and not (is_planned and is_buffer and is_buffer[index]):
            found += default
    return tuple(found)


def _planned(given: PlannedFunction, buffers: Sequence[pa.Field]) -> Aggregate:
    names = [buffer.name for buffer in buffers]
    first = given.first + next((index for index, name in enumerate(names) if name), 0)
    call = parse_aggregate(given.text)
    width = 0 if call is None else FUNCTIONS[call.name].width(names, first)
    if call is None or not width:
        raise DescriptorError(
            f"the query's plan has {given.text!r} at _{first}, and the checkpoint has other buffers: {_shown(buffers)}"
        )
    return Aggregate(given.text, call, first, width)


def _evident(buffers: Sequence[pa.Field]) -> Iterator[Aggregate]:
    """Yield the functions that are evident from the buffers alone."""
    names = [buffer.name for buffer in buffers]
    for index, buffer in enumerate(buffers):
        for name in EVIDENT:
            width = FUNCTIONS[name].width(names, index)
            if width and (name != "approx_count_distinct" or precision_of(width) is not None):
                yield Aggregate(name, FunctionCall(name), index, width)
        if buffer.name == "sum" and names[index + 1 : index + 2] == ["isEmpty"]:
            yield Aggregate("sum", FunctionCall("sum"), index, 2)


def hint_of(buffers: Sequence[pa.Field], results: Iterable[Aggregate]) -> str | None:
    """Return how to name the functions, if the buffers without a result are ambiguous; otherwise None."""
    covered = {index for each in results for index in range(each.first, each.end)}
    names = ["" if index in covered else buffer.name for index, buffer in enumerate(buffers)]
    for index in range(len(names)):
        for name in ("avg", "kurtosis", "skewness", "stddev", "corr", "covar_samp", "max_by", "collect_set"):
            width = FUNCTIONS[name].width(names, index)
            if width:
                argument = "(tag::string)" if name == "collect_set" else "(price)"
                shown = ", ".join(names[index : index + width])
                return (
                    f"{shown} may be the buffers of {name}, or of other functions: name all of the query's, in order: "
                    f'--column mean="{name}{argument}"'
                )
    return None


def _earliest(functions: Sequence[Function], names: Sequence[str]) -> list[int]:
    """Return the first position of each function, after those before it; shorter if one has no position."""
    found: list[int] = []
    at = 0
    for function in functions:
        while at < len(names) and not function.width(names, at):
            at += 1
        if at == len(names):
            break
        found.append(at)
        at += function.width(names, at)
    return found


def _latest(functions: Sequence[Function], names: Sequence[str]) -> list[int]:
    """Return the last position of each function, before those after it."""
    found: list[int] = []
    end = len(names)
    for function in reversed(functions):
        at = end - 1
        while not 0 < function.width(names, at) <= end - at:
            at -= 1
        found.append(at)
        end = at
    return found[::-1]


def _shown(buffers: Sequence[pa.Field]) -> str:
    return ", ".join(f"_{index} {buffer.name}: {type_name(buffer.type)}" for index, buffer in enumerate(buffers))


def _is_balanced(text: str) -> bool:
    """Return whether the parentheses in a text are balanced."""
    depth = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if depth < 0:
            return False
    return depth == 0


def _parts(text: str) -> Iterator[str]:
    """Yield the arguments of a call."""
    depth = start = 0
    for index, character in enumerate(text):
        depth += (character in OPENING) - (character in CLOSING)
        if character == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    yield text[start:]
