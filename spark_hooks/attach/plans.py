"""The aggregate functions of a running query, read from its plan, on the driver.

Spark's optimizer rewrites functions: `count_if` is a `count`, and sums of small decimals are sums of integers. So the
functions come from the optimized plan, as Spark itself finds them when it plans a micro-batch.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.sql.streaming.query import StreamingQuery

from spark_hooks.sessions import execution_of, is_connect
from state_backend.attach.aggregates import PlannedFunction, parse_aggregate
from state_backend.attach.states import distinct_names
from state_backend.checkpoint.checkpoint import STATE_STORE_SETTINGS
from state_backend.model.errors import DescriptorError

logger = logging.getLogger("sparkis.attach")

LEGACY_SETTING = "spark.sql.legacy.statisticalAggregate"
STATISTICAL = {"stddev", "std", "stddev_samp", "variance", "var_samp", "skewness", "kurtosis", "covar_samp", "corr"}
# Functions whose argument type is read from the plan, because the buffers do not tell it.
TYPED = {"collect_list", "collect_set", "array_agg", "percentile", "percentile_approx", "approx_percentile"}
# Functions whose result depends on their further arguments.
WITH_ARGUMENTS = {"percentile", "percentile_approx", "approx_percentile"}
# Texts of arguments that are shown as they are; HIDDEN replaces others.
SHOWN = re.compile(r"[\w .*+/%'-]+")
HIDDEN = "expression"


def functions_of(query: StreamingQuery) -> list[list[PlannedFunction]]:
    """Return the functions of each aggregation of a query, in the order of their operators' numbers.

    A function that sparkis cannot compute is left out, with a warning. Empty if the plan cannot be read.
    """
    if is_connect(query):
        return []
    execution = execution_of(query)
    try:
        session = execution.sparkSession()
        plan = session.sessionState().optimizer().execute(execution.analyzedPlan())
        is_legacy = str(session.conf().get(LEGACY_SETTING, "false")).lower() == "true"
        return [list(_finished(query, aggregation, is_legacy)) for aggregation in _aggregations(plan, None)]
    except Py4JError as error:
        logger.debug("the plan of query %s cannot be read: %s", query.name, error)
        return []


def real_time_settings_of(query: StreamingQuery) -> dict[str, str] | None:
    """Return the settings of a query in Real-Time Mode that say how its state is stored; None for another query."""
    if is_connect(query):
        return None
    execution = execution_of(query)
    if _kind(execution.trigger()) != "RealTimeTrigger":
        return None
    settings = execution.sparkSession().conf()
    return {name: str(settings.get(name)) for name in STATE_STORE_SETTINGS}


class Results(NamedTuple):
    """The columns of an aggregation's result by their names: parts of the key, as the checkpoint names them; functions.

    A column that is computed of several results is in neither.
    """

    keys: dict[str, str]
    functions: tuple[str, ...]


def results_of(plan: Any) -> list[Results]:
    """Return the results of each streaming aggregation in an optimized plan."""
    found = []
    for aggregation, parent in _streaming_aggregates(plan, None):
        grouping = list(_all(_physical(aggregation)._1()))
        names = distinct_names([str(each.name()) for each in grouping])
        by_id = {_id(each.toAttribute()): name for each, name in zip(grouping, names, strict=True)}
        keys = {}
        renamed = _renamed(parent)
        for column in _all(_physical(aggregation)._3()):
            source = column.child() if _kind(column) == "Alias" else column
            if _kind(source) == "AttributeReference" and _id(source) in by_id:
                keys[renamed.get(_id(column), str(column.name()))] = by_id[_id(source)]
        functions = (each for each in _functions(aggregation, parent) if _is_known(each))
        found.append(Results(keys, tuple(each.name for each in functions)))
    return found


def _is_known(function: PlannedFunction) -> bool:
    try:
        return parse_aggregate(function.text) is not None
    except DescriptorError:
        return False


def _finished(query: StreamingQuery, functions: list[PlannedFunction], is_legacy: bool) -> Iterator[PlannedFunction]:
    for function in functions:
        try:
            call = parse_aggregate(function.text)
            if call is None:
                raise DescriptorError(f"sparkis does not know the function {function.text}")
            if is_legacy and call.name in STATISTICAL:
                raise DescriptorError(f"{function.text} depends on {LEGACY_SETTING}, which sparkis does not support")
        except DescriptorError as error:
            logger.warning("query %s: the column %r is left out: %s", query.name, function.name, error)
            continue
        yield function


def _aggregations(plan: Any, parent: Any) -> Iterator[list[PlannedFunction]]:
    """Yield the functions of each streaming aggregation, from the sink to the sources, as Spark numbers operators."""
    for aggregation, above in _streaming_aggregates(plan, parent):
        yield list(_functions(aggregation, above))


def _streaming_aggregates(plan: Any, parent: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each streaming aggregation and the operator above it."""
    if plan.nodeName() == "Aggregate" and plan.isStreaming():
        yield plan, parent
    for child in _all(plan.children()):
        yield from _streaming_aggregates(child, plan)


def _physical(aggregation: Any) -> Any:
    """Return an aggregation's grouping, functions and results, as Spark plans it."""
    jvm: Any = SparkContext._jvm
    return jvm.org.apache.spark.sql.catalyst.planning.PhysicalAggregation.unapply(aggregation).get()


def _functions(plan: Any, parent: Any) -> Iterator[PlannedFunction]:
    found = _physical(plan)
    names = _names(found._3(), parent)
    first = 0
    for each in _all(found._2()):
        function = each.aggregateFunction()
        text = _text(function)
        yield PlannedFunction(names.get(_id(each.resultAttribute()), text), text, first)
        first += int(function.aggBufferAttributes().size())


def _names(results: Any, parent: Any) -> dict[str, str]:
    """Return the names of columns that are the result of one function, by the id of the function's result."""
    renamed = _renamed(parent)
    found = {}
    for column in _all(results):
        source = _result(column.child()) if _kind(column) == "Alias" else column
        if source is not None and _kind(source) == "AttributeReference":
            name = renamed.get(_id(column), str(column.name()))
            if not name.startswith("_aggregateexpression"):
                found[_id(source)] = name
    return found


def _renamed(parent: Any) -> dict[str, str]:
    """Return the names that a projection gives to columns, by the columns' ids."""
    renamed = {}
    if parent is not None and parent.nodeName() == "Project":
        for column in _all(parent.projectList()):
            source = column.child() if _kind(column) == "Alias" else column
            if _kind(source) == "AttributeReference":
                renamed[_id(source)] = str(column.name())
    return renamed


def _result(expression: Any) -> Any:
    """Return a function's result without the optimizer's conversions around it; None for other expressions."""
    kind = _kind(expression)
    if kind == "AttributeReference":
        return expression
    if kind == "MakeDecimal":
        return expression.child()
    if kind == "Cast" and _kind(expression.child()) == "Divide":
        return expression.child().left()
    return None


def _text(function: Any) -> str:
    """Return the text of a function, as `parse_aggregate` reads it."""
    name = str(function.prettyName())
    if _kind(function) == "Percentile" and function.reverse():
        name = "reversed_percentile"
    arguments = list(_all(function.children()))
    if not arguments:
        return f"{name}()"
    first = arguments[0]
    is_unscaled = _kind(first) == "UnscaledValue"
    first = first.child() if is_unscaled else first
    kind = f"::{first.dataType().catalogString()}" if is_unscaled or name in TYPED else ""
    others = arguments[1:] if name in WITH_ARGUMENTS else []
    return f"{name}({', '.join([_shown(first) + kind, *(str(each.sql()) for each in others)])})"


def _shown(argument: Any) -> str:
    text = str(argument.sql())
    return text if SHOWN.fullmatch(text) else HIDDEN


def _kind(expression: Any) -> str:
    return str(expression.getClass().getSimpleName())


def _id(attribute: Any) -> str:
    return str(attribute.exprId())


def _all(sequence: Any) -> Iterator[Any]:
    for index in range(sequence.size()):
        yield sequence.apply(index)
