"""Stateful processors that declare which of their variables readers can read.

    df.groupBy("sensor").transformWithState(
        sparkis.queryable_processor(Alert(), states={"lastTemperature": "lastTemp"}), ...)

A declaration alone makes nothing readable; an attachment does. Spark pickles a processor when it makes the operator,
and the pickled bytes contain the declaration as a text. On the driver, `attach.declared` reads the text from the plan
of the running query, without a registry or messages between processes.

Spark's Python workers import this module, so it imports little.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from spark_hooks.attach.declaration import MARKER, REFUSAL_PROPERTY
from state_backend.model.descriptor import check_name
from state_backend.model.errors import DescriptorError

if TYPE_CHECKING:
    from state_backend.attach.states import AttachedState

# The methods of a handle that make a readable variable, and the variable's kind.
VARIABLE_GETTERS = {"getValueState": "ValueState", "getListState": "ListState", "getMapState": "MapState"}

# Called when a processor with declared states is pickled. Spark pickles it when it makes the query's operator.
_pickle_callbacks: list[Callable[[], None]] = []


def add_pickle_callback(callback: Callable[[], None]) -> None:
    """Add a function that is called whenever a processor with declared states is pickled.

    `sparkis` registers the function that listens for started queries. Python workers do not.
    """
    if callback not in _pickle_callbacks:
        _pickle_callbacks.append(callback)


def queryable_processor(
    processor: StatefulProcessor, *, states: Mapping[str, str | AttachedState]
) -> QueryableProcessor:
    """Declare variables of a stateful processor as states for readers; return a processor for `transformWithState`.

    The returned processor behaves like the given one and uses the same state. When a query with it starts, an
    attachment in this driver publishes the declared variables until the query ends; `sparkis.attach(query)` returns
    that attachment. The query needs a name, with which keys begin, and the session a log (`serve`, or the setting
    `spark.sparkis.log`). Spark keeps the state of such queries in RocksDB; with a changelog, as in the
    example, a micro-batch is read without the rest of the state.

    Args:
        processor: An instance of a `StatefulProcessor`.
        states: A mapping from the state's name in keys to the name of the processor's variable, or to an
            `AttachedState(variable=..., ...)` for further options, such as `key_format` or `kind`.

    Returns:
        A processor with the declared states in its attribute `states`.

    Raises:
        DescriptorError: `processor` is not a `StatefulProcessor`, or `states` is empty or invalid. A variable that the
            processor does not have fails the query in its first micro-batch.

    Examples:
        >>> from pyspark.sql.streaming import StatefulProcessor
        >>> class Alert(StatefulProcessor):
        ...     def init(self, handle):
        ...         self.last = handle.getValueState("lastTemp", "temp double")
        ...     def handleInputRows(self, key, rows, timerValues):
        ...         self.last.update((max(row.temp for row in rows),))
        ...         return iter(())

        >>> store = "spark.sql.streaming.stateStore"
        >>> spark.conf.set(f"{store}.rocksdb.changelogCheckpointing.enabled", "true")
        >>> spark.conf.set(
        ...     f"{store}.providerClass", "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ... )
        >>> spark.conf.set("spark.sparkis.log", f"{path}/log")

        >>> rows = spark.createDataFrame([("boiler", 81.5), ("boiler", 83.0)], "sensor string, temp double")
        >>> rows.write.json(f"{path}/temps")
        >>> temps = spark.readStream.schema(rows.schema).json(f"{path}/temps")
        >>> alert = sparkis.queryable_processor(Alert(), states={"lastTemperature": "lastTemp"})
        >>> alerts = temps.groupBy("sensor").transformWithState(alert, "sensor string", "append", "none")
        >>> writer = alerts.writeStream.format("noop").queryName("sensors")
        >>> query = writer.option("checkpointLocation", f"{path}/checkpoint").start()
        >>> query.processAllAvailable()
        >>> sparkis.attach(query).wait()
        True
        >>> query.stop()

        >>> with sparkis.read_snapshot(f"{path}/log", "sensors") as snapshot:
        ...     snapshot.value(b"sensors:lastTemperature:boiler")
        b'83'
    """
    if not isinstance(processor, StatefulProcessor):
        raise DescriptorError(
            f"queryable_processor takes an instance of a StatefulProcessor, not {processor!r}; call a class first"
        )
    if isinstance(processor, QueryableProcessor):
        raise DescriptorError("this processor has declared its states already; give all of them in one call")
    if not isinstance(states, Mapping) or not states:
        raise DescriptorError(
            f"states= maps names of states to variables, such as {{'lastTemperature': 'lastTemp'}}, not {states!r}"
        )
    described = [_arguments(name, given) for name, given in states.items()]
    try:
        return QueryableProcessor(processor, json.dumps(described))
    except TypeError as error:
        raise DescriptorError(f"states= {states!r}: {error}") from None


def _arguments(name: str, given: str | AttachedState) -> dict[str, Any]:
    """Return the arguments of a state's AttachedState, as plain JSON."""
    check_name("state", name)
    if isinstance(given, str) and given:
        return {"name": name, "variable": given}
    arguments = {key: value for key, value in getattr(given, "__dict__", {}).items() if value not in (None, ())}
    if not arguments.get("variable"):
        raise DescriptorError(
            f"state {name!r}: give the name of a variable of the processor, or sparkis.AttachedState(variable=..., "
            f"...), not {given!r}"
        )
    if arguments.get("name", name) != name:
        raise DescriptorError(f"state {name!r} has another name in its AttachedState, {arguments['name']!r}")
    if "operator" in arguments:
        raise DescriptorError(f"state {name!r} belongs to the processor's own operator; leave out operator=")
    if "columns" in arguments:
        arguments["columns"] = dict(arguments["columns"])
    return arguments | {"name": name}


class QueryableProcessor(StatefulProcessor):
    """A stateful processor with declared states; `queryable_processor` returns it.

    It delegates all work to another processor. Spark pickles both on the driver, when it makes the query's operator,
    and runs them in Python workers.
    """

    def __init__(self, processor: StatefulProcessor, described: str) -> None:
        self._processor = processor
        self._described = described

    @property
    def states(self) -> tuple[AttachedState, ...]:
        """The declared states, for `sparkis.attach(checkpoint=..., states=...)`."""
        from state_backend.attach.states import AttachedState  # imported here, because Python workers do not need it

        return tuple(AttachedState(**described) for described in json.loads(self._described))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the declaration as one text that begins with `MARKER`, and call the pickle callbacks."""
        for callback in _pickle_callbacks:
            callback()
        return (_unpickled, (self._processor, MARKER + self._described))

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Initialize the processor; DescriptorError if a declared variable is missing or cannot be read.

        Runs in each task. Before that, Spark runs it once on the driver's host, in a process whose errors it hides.
        """
        context = TaskContext.get()
        if context is None:
            self._processor.init(handle)
            return
        if refusal := context.getLocalProperty(REFUSAL_PROPERTY):
            raise DescriptorError(refusal)
        with _recording_variables(handle) as kinds:
            self._processor.init(handle)
        self._check(kinds)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        """Call the processor."""
        return self._processor.handleInputRows(key, rows, timerValues)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        """Call the processor."""
        return self._processor.handleExpiredTimer(key, timerValues, expiredTimerInfo)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        """Call the processor."""
        self._processor.handleInitialState(key, initialState, timerValues)

    def close(self) -> None:
        """Call the processor."""
        self._processor.close()

    def _variables(self) -> Iterator[tuple[str, str]]:
        return ((each["name"], each["variable"]) for each in json.loads(self._described))

    def _check(self, kinds: Mapping[str, str]) -> None:
        for state, variable in self._variables():
            if variable not in kinds:
                available = ", ".join(f"{name!r} ({kind})" for name, kind in kinds.items()) or "none"
                raise DescriptorError(
                    f"state {state!r}: the processor {type(self._processor).__name__} has no variable {variable!r} "
                    f"that can be read; it has {available}. Timers cannot be read"
                )


def _unpickled(processor: StatefulProcessor, marked: str) -> QueryableProcessor:
    return QueryableProcessor(processor, marked.removeprefix(MARKER))


@contextmanager
def _recording_variables(handle: StatefulProcessorHandle) -> Iterator[dict[str, str]]:
    """Record the name and kind of each variable that a handle makes. The handle is restored at the end."""
    kinds: dict[str, str] = {}

    def recording(make: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def make_and_record(stateName: str, *given: Any, **more: Any) -> Any:
            kinds[stateName] = kind
            return make(stateName, *given, **more)

        return make_and_record

    for name, kind in VARIABLE_GETTERS.items():
        vars(handle)[name] = recording(getattr(handle, name), kind)
    try:
        yield kinds
    finally:
        for name in VARIABLE_GETTERS:
            del vars(handle)[name]
