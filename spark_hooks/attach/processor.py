"""A stateful processor that declares which of its variables are state for readers.

    df.groupBy("sensor").transformWithState(
        sparkis.queryable_processor(Alert(), states={"lastTemperature": "lastTemp"}), ...)

It only declares. Spark pickles a processor when its operator is made, and the declaration travels in these bytes, as a
text: on the driver the plan of a running query tells what is declared (`attach.declared`), which needs neither a
registry nor a word from another process. What makes the state readable is an attachment.

This module is imported by Spark's Python workers, so it imports little.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from state_backend.model.descriptor import check_name
from state_backend.model.errors import DescriptorError

if TYPE_CHECKING:
    from spark_hooks.attach.rows import AttachedState

# What stands before the declaration, which is JSON in ASCII: a list of the arguments of AttachedState.
MARK = "sparkis.queryable_processor:"
# A handle's methods that make a variable that can be read, and its kind.
MAKERS = {"getValueState": "ValueState", "getListState": "ListState", "getMapState": "MapState"}
# Why the driver refuses what the processors of a query declare together; a task's local property.
REFUSAL_PROPERTY = "sparkis.refusal"
CHANGELOG_SETTING = "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled"


# Called when a declared processor is pickled, which is when Spark makes an operator of it.
_watches: list[Callable[[], None]] = []


def on_declared(watch: Callable[[], None]) -> None:
    """Have a function called whenever a declared processor is pickled.

    `sparkis` gives it the one that notices starts of queries. Workers neither pickle nor know it.
    """
    if watch not in _watches:
        _watches.append(watch)


def queryable_processor(
    processor: StatefulProcessor, *, states: Mapping[str, str | AttachedState]
) -> QueryableProcessor:
    """Declare variables of a stateful processor as state for readers, and return a processor for `transformWithState`.

    The returned processor computes what the given one computes, from the same state. When a query with it has started,
    an attachment in this driver publishes the declared variables until the query ends; `sparkis.attach(query)` returns
    that attachment. The query needs a name, which begins the keys, and the session a log (`serve`, or the setting
    `spark.sparkis.log`). Spark has to keep the state in RocksDB and write down its changes, as in the example.

    Args:
        processor: An instance of a `StatefulProcessor`.
        states: For each state's name, as it is to stand in keys: the name of the processor's variable, or an
            `AttachedState(variable=..., ...)` where there is more to say, such as `key_format` or `kind`.

    Returns:
        A processor that has the declared states as `states`.

    Raises:
        DescriptorError: `processor` is no processor, or `states` declares nothing or something impossible. A variable
            that the processor does not have fails the query in its first micro-batch.

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
            f"queryable_processor takes an instance of a StatefulProcessor, not {processor!r}; for a class, call it"
        )
    if isinstance(processor, QueryableProcessor):
        raise DescriptorError("this processor has declared its states already; give all of them in one call")
    if not isinstance(states, Mapping) or not states:
        raise DescriptorError(
            f"states= says which variable each state is read from, such as {{'lastTemperature': 'lastTemp'}}, "
            f"not {states!r}"
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
            f"state {name!r} is a variable of the processor: its name, or sparkis.AttachedState(variable=..., ...), "
            f"not {given!r}"
        )
    if arguments.get("name", name) != name:
        raise DescriptorError(f"state {name!r} has another name in its AttachedState, {arguments['name']!r}")
    if "operator" in arguments:
        raise DescriptorError(f"state {name!r}: its operator is the processor's own; leave out operator=")
    if "columns" in arguments:
        arguments["columns"] = dict(arguments["columns"])
    return arguments | {"name": name}


class QueryableProcessor(StatefulProcessor):
    """A stateful processor with declared states, as `queryable_processor` returns it.

    Another processor does all the work. Spark pickles both on the driver, when it makes the query's operator, and runs
    them in Python workers.
    """

    def __init__(self, processor: StatefulProcessor, described: str) -> None:
        self._processor = processor
        self._described = described

    @property
    def states(self) -> tuple[AttachedState, ...]:
        """The declared states, for `sparkis.attach(checkpoint=..., states=...)`."""
        from spark_hooks.attach.rows import AttachedState  # not for the workers

        return tuple(AttachedState(**described) for described in json.loads(self._described))

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep the declaration in the bytes as a text of its own, and have starts of queries noticed from now on."""
        for watch in _watches:
            watch()
        return (_unpickled, (self._processor, MARK + self._described))

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Let the processor make its variables, and refuse what keeps a declared one from being read.

        Runs in each task, and before that in a process on the driver's host, whose errors Spark does not show.
        """
        context = TaskContext.get()
        if context is None:
            self._processor.init(handle)
            return
        if refusal := context.getLocalProperty(REFUSAL_PROPERTY):
            raise DescriptorError(refusal)
        self._check_changelog(context.getLocalProperty(CHANGELOG_SETTING) or "false")
        with _watched(handle) as kinds:
            self._processor.init(handle)
        self._check(kinds)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        """Leave it to the processor."""
        return self._processor.handleInputRows(key, rows, timerValues)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        """Leave it to the processor."""
        return self._processor.handleExpiredTimer(key, timerValues, expiredTimerInfo)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        """Leave it to the processor."""
        self._processor.handleInitialState(key, initialState, timerValues)

    def close(self) -> None:
        """Leave it to the processor."""
        self._processor.close()

    def _variables(self) -> Iterator[tuple[str, str]]:
        return ((each["name"], each["variable"]) for each in json.loads(self._described))

    def _check(self, kinds: Mapping[str, str]) -> None:
        for state, variable in self._variables():
            if variable not in kinds:
                known = ", ".join(f"{name!r} ({kind})" for name, kind in kinds.items()) or "none"
                raise DescriptorError(
                    f"state {state!r}: the processor {type(self._processor).__name__} has no variable {variable!r} "
                    f"that can be read; it has {known}. Timers cannot be read"
                )

    def _check_changelog(self, setting: str) -> None:
        """Refuse state whose changes nobody writes down."""
        if setting.lower() != "true":
            names = ", ".join(repr(state) for state, _ in self._variables())
            raise DescriptorError(
                f"{names}: RocksDB keeps the state without a change log, so that the changes of a batch cannot be "
                f"read: start the query with {CHANGELOG_SETTING}=true"
            )


def _unpickled(processor: StatefulProcessor, marked: str) -> QueryableProcessor:
    return QueryableProcessor(processor, marked.removeprefix(MARK))


def declared_in(pickled: bytes) -> Iterable[dict[str, Any]]:
    """Return what a pickled processor declares; nothing if it declares nothing.

    Looks for the text and unpickles nothing: that would run code of the user's, and pickle never cuts a text in two.
    """
    mark, read = MARK.encode(), json.JSONDecoder()
    at = pickled.find(mark)
    while at >= 0:
        begin = at + len(mark)
        try:
            found, _ = read.raw_decode(pickled[begin:].decode("ascii", "replace"))
        except ValueError:  # the mark alone, in a module that is pickled with its processor
            at = pickled.find(mark, begin)
        else:
            return list(found)
    return ()


@contextmanager
def _watched(handle: StatefulProcessorHandle) -> Iterator[dict[str, str]]:
    """Note which variables are made by a handle, and of what kind they are; afterwards the handle is as it was."""
    kinds: dict[str, str] = {}

    def noting(make: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def make_and_note(stateName: str, *given: Any, **more: Any) -> Any:
            kinds[stateName] = kind
            return make(stateName, *given, **more)

        return make_and_note

    for name, kind in MAKERS.items():
        vars(handle)[name] = noting(getattr(handle, name), kind)
    try:
        yield kinds
    finally:
        for name in MAKERS:
            del vars(handle)[name]
