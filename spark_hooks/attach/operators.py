"""Which state a query keeps, as its checkpoint tells: the operators, their collections, and what these look like.

Runs on the driver, once when an attachment is made. Spark's own readers `state-metadata` and `statestore` are asked.
A collection is what one read of `statestore` gives: an operator's keyed state, one side of a join, one variable of a
transformWithState.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from spark_hooks.checkpoint import Checkpoint, CheckpointError
from state_backend.model.descriptor import Kind
from state_backend.model.errors import DescriptorError


class Form(StrEnum):
    """What the key and the value of a collection are made of, where `rows` treats them differently."""

    PLAIN = "plain"
    SEEN = "seen"
    SESSION = "session"
    GROUP = "group"
    JOIN = "join"
    VARIABLE = "variable"


# Spark's name of an operator: what its state is called in a key unless told otherwise, and its form.
OPERATORS = {
    "stateStoreSave": ("aggregation", Form.PLAIN),
    "sessionWindowStateStoreSaveExec": ("sessions", Form.SESSION),
    "dedupe": ("seen", Form.SEEN),
    "dedupeWithinWatermark": ("seen", Form.SEEN),
    "flatMapGroupsWithState": ("groupState", Form.GROUP),
    "applyInPandasWithState": ("groupState", Form.GROUP),
}
JOIN = "symmetricHashJoin"
JOIN_STORES = {"left": "left-keyWithIndexToValue", "right": "right-keyWithIndexToValue"}
JOIN_SETTING = "spark.sql.streaming.join.stateFormatVersion"
TRANSFORMS = ("transformWithStateExec", "transformWithStateInPandasExec", "transformWithStateInPySparkExec")
VARIABLE_KINDS = {"ValueState": Kind.VALUE, "ListState": Kind.LIST, "MapState": Kind.MAP}


@dataclass(frozen=True)
class Collection:
    """One collection of an operator's state. `variable` is a transformWithState's, or the side of a join."""

    operator_id: int
    operator: str
    variable: str | None
    name: str
    form: Form
    kind: Kind
    has_ttl: bool
    options: tuple[tuple[str, str], ...]
    schema: T.StructType

    def __str__(self) -> str:
        """Name it in an error."""
        variable = "" if self.variable is None else f", {self.variable!r}"
        return f"operator {self.operator_id} ({self.operator}{variable})"

    def type_of(self, column: str) -> T.StructType:
        """Return what one of the columns of Spark's reader is made of."""
        kind = self.schema[column].dataType
        assert isinstance(kind, T.StructType)
        return kind

    def whole(self, spark: SparkSession, checkpoint: Checkpoint, batch: int) -> DataFrame:
        """Return the whole collection as of a batch."""
        return self._read(spark, checkpoint, batchId=batch)

    def feed(self, spark: SparkSession, checkpoint: Checkpoint, first: int, last: int) -> DataFrame:
        """Return the changes of some batches; those of one key lie in one partition, in the order they were made."""
        return self._read(spark, checkpoint, readChangeFeed="true", changeStartBatchId=first, changeEndBatchId=last)

    def _read(self, spark: SparkSession, checkpoint: Checkpoint, **options: str | int) -> DataFrame:
        given = {name: str(value) for name, value in options.items()}
        return spark.read.format("statestore").options(**dict(self.options), **given).load(checkpoint.location)


def collections(spark: SparkSession, checkpoint: Checkpoint, batch: int) -> list[Collection]:
    """Return what can be read of a query's state, as of a committed batch."""
    try:
        rows = spark.read.format("state-metadata").load(checkpoint.location).collect()
    except PySparkException as error:
        raise CheckpointError(f"Spark cannot tell which state {checkpoint.location} holds: {error}") from None
    if not rows:
        raise DescriptorError(f"the query of {checkpoint.location} keeps no state: there is nothing to attach to")
    found: list[Collection] = []
    for operator_id in sorted({row.operatorId for row in rows}):
        of_operator = [row for row in rows if row.operatorId == operator_id]
        for variable, name, form, kind, has_ttl, options in _parts(of_operator):
            given = {"operatorId": str(operator_id), **options}
            schema = _schema(spark, checkpoint, batch, given)
            operator = of_operator[0].operatorName
            made = Collection(operator_id, operator, variable, name, form, kind, has_ttl, tuple(given.items()), schema)
            found.append(made)
    return _with_own_names(found)


def _parts(rows: list[Any]) -> list[tuple[str | None, str, Form, Kind, bool, dict[str, str]]]:
    """Return variable, name, form, kind, whether it has a time to live, and the reader's options of each collection."""
    operator = rows[0].operatorName
    if operator == JOIN:
        stores = {row.stateStoreName for row in rows}
        if not stores >= set(JOIN_STORES.values()):
            raise DescriptorError(
                f"operator {rows[0].operatorId} is a stream-stream join that keeps both sides in one store "
                f"({JOIN_SETTING}=3 or 4), whose changes Spark's state reader does not tell apart; sparkis reads 2, "
                f"the default, and a query keeps what it was first started with"
            )
        return [(side, side, Form.JOIN, Kind.MAP, False, {"storeName": store}) for side, store in JOIN_STORES.items()]
    if operator in TRANSFORMS:
        properties = json.loads(rows[0].operatorProperties)
        variables = sorted(properties["stateVariables"], key=lambda each: str(each["stateName"]))
        return [
            (each["stateName"], each["stateName"], Form.VARIABLE, kind, each["ttlEnabled"], _variable(each))
            for each in variables
            if (kind := VARIABLE_KINDS.get(each["stateVariableType"])) is not None  # else timers
        ]
    name, form = OPERATORS.get(operator, (operator, Form.PLAIN))
    return [(None, name, form, Kind.VALUE, False, {})]


def _variable(described: dict[str, Any]) -> dict[str, str]:
    return {"stateVarName": str(described["stateName"])}


def _schema(spark: SparkSession, checkpoint: Checkpoint, batch: int, options: dict[str, str]) -> T.StructType:
    try:
        reader = spark.read.format("statestore").options(batchId=str(batch), **options)
        return reader.load(checkpoint.location).schema
    except PySparkException as error:
        raise CheckpointError(f"Spark cannot read operator {options['operatorId']}: {error}") from None


def _with_own_names(found: list[Collection]) -> list[Collection]:
    """Add the operator's number to names that several operators have."""
    names = [each.name for each in found]
    return [
        each if names.count(each.name) == 1 else replace(each, name=f"{each.name}{each.operator_id}") for each in found
    ]
