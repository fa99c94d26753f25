"""The operators of a query and their states, read from the query's checkpoint.

Runs on the driver, once per attachment, with Spark's readers `state-metadata` and `statestore`. One read of
`statestore` returns one operator state: the keyed state of an operator, one side of a join, or one variable of a
transformWithState.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from spark_hooks.checkpoint import SparkCheckpoint
from state_backend.checkpoint.states import JOIN, OPERATORS, TRANSFORMS, VARIABLES, StateForm
from state_backend.model.descriptor import Kind
from state_backend.model.errors import CheckpointError, DescriptorError

JOIN_STORES = {"left": "left-keyWithIndexToValue", "right": "right-keyWithIndexToValue"}
JOIN_SETTING = "spark.sql.streaming.join.stateFormatVersion"


@dataclass(frozen=True)
class OperatorState:
    """One state of an operator.

    Args:
        variable: A variable of transformWithState, or the side of a join.
    """

    operator_id: int
    operator: str
    variable: str | None
    name: str
    form: StateForm
    kind: Kind
    has_ttl: bool
    options: tuple[tuple[str, str], ...]
    schema: T.StructType

    def __str__(self) -> str:
        """Return the state's name for error texts."""
        variable = "" if self.variable is None else f", {self.variable!r}"
        return f"operator {self.operator_id} ({self.operator}{variable})"

    def type_of(self, column: str) -> T.StructType:
        """Return the struct type of a column of Spark's reader."""
        kind = self.schema[column].dataType
        assert isinstance(kind, T.StructType)
        return kind

    def snapshot(self, spark: SparkSession, checkpoint: SparkCheckpoint, batch: int) -> DataFrame:
        """Return the full state as of a batch."""
        return self._read(spark, checkpoint, batchId=batch)

    def changes(self, spark: SparkSession, checkpoint: SparkCheckpoint, first: int, last: int) -> DataFrame:
        """Return the changes of some batches; all changes of a key are in one partition, in their original order."""
        return self._read(spark, checkpoint, readChangeFeed="true", changeStartBatchId=first, changeEndBatchId=last)

    def _read(self, spark: SparkSession, checkpoint: SparkCheckpoint, **options: str | int) -> DataFrame:
        given = {name: str(value) for name, value in options.items()}
        return spark.read.format("statestore").options(**dict(self.options), **given).load(checkpoint.location)


def operator_states(spark: SparkSession, checkpoint: SparkCheckpoint, batch: int) -> list[OperatorState]:
    """Return the readable states of a query as of a committed batch."""
    try:
        rows = spark.read.format("state-metadata").load(checkpoint.location).collect()
    except PySparkException as error:
        raise CheckpointError(f"Spark cannot read the state metadata of {checkpoint.location}: {error}") from None
    if not rows:
        raise DescriptorError(f"the query of {checkpoint.location} has no state, so there is nothing to attach to")
    found: list[OperatorState] = []
    for operator_id in sorted({row.operatorId for row in rows}):
        of_operator = [row for row in rows if row.operatorId == operator_id]
        for variable, name, form, kind, has_ttl, options in _variables_of(of_operator):
            reader_options = {"operatorId": str(operator_id), **options}
            schema = _schema(spark, checkpoint, batch, reader_options)
            operator = of_operator[0].operatorName
            result = OperatorState(
                operator_id, operator, variable, name, form, kind, has_ttl, tuple(reader_options.items()), schema
            )
            found.append(result)
    return _with_own_names(found)


def _variables_of(rows: list[Any]) -> list[tuple[str | None, str, StateForm, Kind, bool, dict[str, str]]]:
    """Return (variable, name, form, kind, has_ttl, options of the reader) of each state of an operator."""
    operator = rows[0].operatorName
    if operator == JOIN:
        stores = {row.stateStoreName for row in rows}
        if not stores >= set(JOIN_STORES.values()):
            raise DescriptorError(
                f"operator {rows[0].operatorId} is a stream-stream join that keeps both sides in one store "
                f"({JOIN_SETTING}=3 or 4), and Spark's state reader does not separate their changes; sparkis reads "
                f"format 2, the default. A query keeps the format of its first start"
            )
        return [
            (side, side, StateForm.JOIN, Kind.MAP, False, {"storeName": store}) for side, store in JOIN_STORES.items()
        ]
    if operator in TRANSFORMS:
        properties = json.loads(rows[0].operatorProperties)
        variables = sorted(properties["stateVariables"], key=lambda each: str(each["stateName"]))
        return [
            (each["stateName"], each["stateName"], form, Kind(form), each["ttlEnabled"], _variable(each))
            for each in variables
            if (form := VARIABLES.get(each["stateVariableType"])) is not None  # timers have no form
        ]
    name, form = OPERATORS.get(operator, (operator, StateForm.PLAIN))
    return [(None, name, form, Kind.VALUE, False, {})]


def _variable(described: dict[str, Any]) -> dict[str, str]:
    return {"stateVarName": str(described["stateName"])}


def _schema(spark: SparkSession, checkpoint: SparkCheckpoint, batch: int, options: dict[str, str]) -> T.StructType:
    try:
        reader = spark.read.format("statestore").options(batchId=str(batch), **options)
        return reader.load(checkpoint.location).schema
    except PySparkException as error:
        raise CheckpointError(f"Spark cannot read operator {options['operatorId']}: {error}") from None


def _with_own_names(found: list[OperatorState]) -> list[OperatorState]:
    """Append the operator's number to names that several operators share."""
    names = [each.name for each in found]
    return [
        each if names.count(each.name) == 1 else replace(each, name=f"{each.name}{each.operator_id}") for each in found
    ]
