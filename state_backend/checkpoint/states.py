"""The readable states of an operator, and the stores or column families that have their rows.

    operator                                    store, or family             state
    streaming aggregation, also in real time    default                      aggregation
    aggregation by session window               default                      sessions
    dropDuplicates, ..WithinWatermark           default                      seen
    [flat]mapGroupsWithState and the like       default                      groupState
    stream-stream join, formats 1 to 3          {side}-keyWithIndexToValue   left, right
    stream-stream join, format 4                {side}-keyWithTsToValues     left, right: lists of rows
    transformWithState                          the variable's family        the variable's name

All other families are Spark's own: timers, counters, indexes of expiry times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import pyarrow as pa

from state_backend.checkpoint.compression import unreadable
from state_backend.checkpoint.metadata import OperatorInfo
from state_backend.checkpoint.schemas import KeyEncoding, KeyForm, StoreSchema

DEFAULT_STORE = "default"
JOIN = "symmetricHashJoin"
SIDES = ("left", "right")
TRANSFORMS = ("transformWithStateExec", "transformWithStateInPandasExec", "transformWithStateInPySparkExec")
# Operators whose state is of no use to a reader.
COUNTERS = ("globalLimit", "streamingGlobalLimit", "streamingLimit")
AGGREGATION, DROP_DUPLICATES = "stateStoreSave", "dedupe"
# The aggregation of a query with a real-time trigger (Spark 4.3).
REAL_TIME_AGGREGATION = "StatefulStreamlineAggregate"
# The value of dropDuplicates: a row with one null. Before Spark 3.3.1, the schema names all columns of the query
# instead.
EMPTY_VALUE = pa.struct([("__dummy__", pa.null())])
# The buffers of aggregations: a grouping column may have such a name, too.
BUFFERS = ("count", "sum", "isEmpty", "avg", "n", "min", "max", "first", "last", "valueSet", "product", "buf", "value")


class StateForm(StrEnum):
    """The forms of keys and values."""

    PLAIN = "plain"
    DEDUPLICATION = "seen"
    SESSION = "session"
    GROUP = "group"
    JOIN = "join"
    VALUE = "value"
    LIST = "list"
    MAP = "map"


# By Spark's name of an operator: the default name of its state in keys, and the form of the state.
OPERATORS = {
    AGGREGATION: ("aggregation", StateForm.PLAIN),
    REAL_TIME_AGGREGATION: ("aggregation", StateForm.PLAIN),
    "sessionWindowStateStoreSaveExec": ("sessions", StateForm.SESSION),
    DROP_DUPLICATES: ("seen", StateForm.DEDUPLICATION),
    "dedupeWithinWatermark": ("seen", StateForm.DEDUPLICATION),
    "flatMapGroupsWithState": ("groupState", StateForm.GROUP),
    "applyInPandasWithState": ("groupState", StateForm.GROUP),
}
# Operators with one form of state: Spark 3.5 writes no names, so a newer version names what was inferred before; and a
# query may get another trigger.
STABLE_NAMES = {
    "applyInPandasWithState": "flatMapGroupsWithState",
    REAL_TIME_AGGREGATION: AGGREGATION,
    **dict.fromkeys(TRANSFORMS, TRANSFORMS[0]),
}
VARIABLES = {"ValueState": StateForm.VALUE, "ListState": StateForm.LIST, "MapState": StateForm.MAP}


@dataclass(frozen=True)
class State:
    """One state of an operator.

    Args:
        name: As in the table above.
        family: The column family in RocksDB; None if the store has none.
        key, value: The columns as Spark stores them; with a time to live, the value has the column `ttlExpirationMs`.
        is_list: A key has several values.
    """

    operator: int
    operator_name: str
    name: str
    form: StateForm
    store: str
    family: str | None
    key: pa.StructType
    value: pa.StructType
    encoding: KeyEncoding
    is_list: bool = False
    has_ttl: bool = False

    def __str__(self) -> str:
        """Return the state's name for error texts."""
        return f"operator {self.operator} ({self.operator_name}), {self.name!r}"


@dataclass(frozen=True)
class UnreadableState:
    """An operator, or one variable of it, whose state sparkis does not read, and why.

    Args:
        name: "" if it is not known.
    """

    operator: int
    name: str
    variable: str | None
    reason: str

    def __str__(self) -> str:
        """Return the state's name, and why it is not read."""
        variable = "" if self.variable is None else f", {self.variable!r}"
        return f"operator {self.operator} ({self.name or 'unknown'}{variable}): {self.reason}"


def has_states(operator: str) -> bool:
    """Return whether sparkis reads the states of an operator."""
    return operator == JOIN or operator in TRANSFORMS or operator in OPERATORS


def states_of(
    operator: OperatorInfo, schemas: Mapping[str, Sequence[StoreSchema]], name: str
) -> tuple[list[State], list[UnreadableState]]:
    """Return the states of an operator, and those that cannot be read.

    Args:
        schemas: The schemas of each of its stores.
        name: The name of its folder, for errors.
    """
    found: list[State | UnreadableState]
    if operator.name == JOIN:
        found = list(_sides(operator, schemas, name))
    elif operator.name in TRANSFORMS:
        found = list(_variables(operator, schemas, name))
    elif operator.name in COUNTERS:
        found = []
    elif operator.name in OPERATORS:
        state, form = OPERATORS[operator.name]
        given = schemas.get(DEFAULT_STORE, ())
        if len(given) != 1:
            raise unreadable(name, f"its state store has {len(given)} schemas, not one")
        schema = replace(given[0], value=EMPTY_VALUE) if operator.name == DROP_DUPLICATES else given[0]
        found = [_state(operator, state, form, DEFAULT_STORE, schema)]
    else:
        reason = f"{name}: the state of the operator {operator.name!r} is not known to sparkis"
        found = [UnreadableState(operator.number, operator.name, None, reason)]
    checked = [_with_readable_keys(each, name) for each in found]
    states = [each for each in checked if isinstance(each, State)]
    return states, [each for each in checked if isinstance(each, UnreadableState)]


def _with_readable_keys(state: State | UnreadableState, name: str) -> State | UnreadableState:
    if isinstance(state, UnreadableState) or state.encoding.form not in (KeyForm.RANGE, KeyForm.TIME_FIRST):
        return state
    reason = f"{name}: keys of {state.name!r} are encoded by {state.encoding.form.value}"
    return UnreadableState(state.operator, state.operator_name, state.name, reason)


def _state(operator: OperatorInfo, name: str, form: StateForm, store: str, schema: StoreSchema) -> State:
    return State(
        operator.number,
        operator.name,
        name,
        form,
        store,
        schema.family,
        schema.key,
        schema.value,
        schema.encoding,
    )


def _sides(operator: OperatorInfo, schemas: Mapping[str, Sequence[StoreSchema]], name: str) -> Iterator[State]:
    families = {schema.family: schema for schema in schemas.get(DEFAULT_STORE, ())}
    for side in SIDES:
        indexed, timed = f"{side}-keyWithIndexToValue", f"{side}-keyWithTsToValues"
        if indexed in schemas:
            yield _state(operator, side, StateForm.JOIN, indexed, schemas[indexed][0])
        elif indexed in families:
            yield _state(operator, side, StateForm.JOIN, DEFAULT_STORE, families[indexed])
        elif timed in families:
            found = _state(operator, side, StateForm.JOIN, DEFAULT_STORE, families[timed])
            yield replace(found, is_list=True)
        else:
            raise unreadable(name, f"the join has no state for its {side} side")


def _variables(
    operator: OperatorInfo, schemas: Mapping[str, Sequence[StoreSchema]], name: str
) -> Iterator[State | UnreadableState]:
    families = {schema.family: schema for schema in schemas.get(DEFAULT_STORE, ())}
    try:
        variables = [
            (str(each["stateName"]), str(each["stateVariableType"]), bool(each["ttlEnabled"]))
            for each in operator.properties["stateVariables"]
        ]
    except (KeyError, TypeError):
        raise unreadable(name, "its metadata does not list the variables of transformWithState") from None
    for variable, kind, has_ttl in sorted(variables):
        if kind == "TimerState":
            continue
        if kind not in VARIABLES:
            reason = f"{name}: the variable {variable!r} is a {kind}, which sparkis does not read"
            yield UnreadableState(operator.number, operator.name, variable, reason)
            continue
        if variable not in families:
            raise unreadable(name, f"there is no schema of the variable {variable!r}")
        form = VARIABLES[kind]
        found = _state(operator, variable, form, DEFAULT_STORE, families[variable])
        yield replace(found, is_list=form is StateForm.LIST, has_ttl=has_ttl)


def state_names(states: Sequence[State]) -> list[str]:
    """Return the default name of each state in keys; with the operator's number where several have one name."""
    names = [state.name for state in states]
    return [
        name if names.count(name) == 1 else f"{name}{state.operator}" for name, state in zip(names, states, strict=True)
    ]


def stable_name(operator: str) -> str:
    """Return a name of an operator that stays the same if another version of Spark continues the query."""
    return STABLE_NAMES.get(operator, operator)


def infer_operator(
    schemas: Mapping[str, Sequence[StoreSchema]], *, aggregations_have_keys: bool = False
) -> tuple[str, int]:
    """Return the name of an operator of Spark 3.5, which writes no metadata, and the columns of its keys' prefix.

    Args:
        aggregations_have_keys: The values of aggregations have the columns of their keys: format 1, of before Spark
            2.4.
    """
    if DEFAULT_STORE not in schemas:
        return JOIN, 0
    schema = schemas[DEFAULT_STORE][0]
    key, value = ([field.name for field in columns] for columns in (schema.key, schema.value))
    if [field.type for field in schema.key] == [pa.null()] and value == ["value"]:
        return COUNTERS[0], 0
    if value == ["__dummy__"]:
        return DROP_DUPLICATES, 0
    if value == ["expiresAtMicros"]:
        return "dedupeWithinWatermark", 0
    if value[:1] == ["groupState"]:
        return "flatMapGroupsWithState", 0
    if key[-1:] == ["sessionStartTime"] and "session_window" in value:
        return "sessionWindowStateStoreSaveExec", len(key) - 1
    has_keys = all(field in list(schema.value) for field in schema.key)
    if has_keys and not aggregations_have_keys and any(name not in BUFFERS for name in key):
        return DROP_DUPLICATES, 0  # begun before Spark 3.3.1
    return AGGREGATION, 0
