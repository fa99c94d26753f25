"""The progress of a query's last finished micro-batch as one hash, `job:_progress`, for dashboards.

The source is Spark's `query.lastProgress`. Spark sets it when a micro-batch has ended, so an epoch has the progress of
the micro-batch before. Reading it starts no Spark job. It is not part of the digest that recognizes a replay.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from state_backend.codec import packed_map
from state_backend.codec.reductions import float_text
from state_backend.log.epochs import to_stream
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import DescriptorError
from state_backend.model.records import Change, Op, runs_of

SETTING = "spark.sparkis.progress"
STATE = "_progress"


def is_enabled(session: SparkSession, argument: bool | None) -> bool:
    """Return whether to publish a query's progress: the argument, or the session's setting if that is None."""
    if argument is not None:
        return bool(argument)
    setting = session.conf.get(SETTING, None) or "false"
    if setting not in ("true", "false"):
        raise DescriptorError(f"{SETTING} is true or false, not {setting!r}")
    return setting == "true"


def check_key_conflict(job: str, states: Sequence[StateDescriptor]) -> None:
    """Raise DescriptorError if a state's keys could be the key of the progress hash."""
    reserved = state_of(job).format_for(job)
    for state in states:
        if state.format_for(job).overlaps(reserved):
            raise DescriptorError(
                f"state {state.name!r} of job {job!r} could make the key {reserved.text!r}, which progress=True uses "
                f"for the query's progress; give the state a key format that begins differently, or leave out progress="
            )


def state_of(job: str) -> StateDescriptor:
    """Return the descriptor of a job's progress hash."""
    return StateDescriptor(STATE, key_format=f"{job}:{STATE}", field="fact", value="value")


def inline_changes_of(job: str, query: StreamingQuery) -> bytes | None:
    """Return the progress of a query's last micro-batch as inline changes of an epoch; None if none has ended yet."""
    last = query.lastProgress
    if last is None:
        return None
    text = last.json if hasattr(last, "json") else json.dumps(last)  # before Spark 4.0 it is a plain dictionary
    fields = fields_of(json.loads(text, parse_float=Decimal))
    packed = packed_map.pack((name.encode(), value.encode()) for name, value in fields.items())
    change = Change(STATE, Op.PUT, f"{job}:{STATE}".encode(), None, packed)
    return to_stream(list(runs_of([change], [STATE])))


def fields_of(progress: dict[str, Any]) -> dict[str, str]:
    """Return the hash's fields from Spark's progress report; a field without a value is left out."""
    operators = progress.get("stateOperators", ())
    found: dict[str, Any] = {
        "batch": progress["batchId"],
        "run_id": progress["runId"],
        "timestamp": progress["timestamp"],
        "batch_duration_ms": progress.get("batchDuration"),
        "input_rows": sum(source["numInputRows"] for source in progress["sources"]),
        "input_rows_per_second": _sum_of(progress["sources"], "inputRowsPerSecond"),
        "processed_rows_per_second": _sum_of(progress["sources"], "processedRowsPerSecond"),
    }
    for name, value in progress.get("eventTime", {}).items():
        found["watermark" if name == "watermark" else f"event_time_{name}"] = value
    if operators:
        found["state_rows"] = sum(operator["numRowsTotal"] for operator in operators)
        found["state_rows_updated"] = sum(operator["numRowsUpdated"] for operator in operators)
        found["state_rows_dropped_by_watermark"] = sum(operator["numRowsDroppedByWatermark"] for operator in operators)
        found["state_memory_bytes"] = sum(operator["memoryUsedBytes"] for operator in operators)
    for name, metrics in progress.get("observedMetrics", {}).items():
        found |= {f"observed.{name}.{metric}": value for metric, value in metrics.items()}
    return dict(_as_texts(found))


def _sum_of(sources: Sequence[dict[str, Any]], name: str) -> Decimal | None:
    """Return the sum of a rate over all sources; None if no source reports it, as in a query's first micro-batch."""
    rates = [Decimal(source[name]) for source in sources if isinstance(source.get(name), (int, Decimal))]
    return sum(rates, Decimal(0)) if rates else None


def _as_texts(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in found.items():
        if value is None:
            continue
        if isinstance(value, Decimal):
            yield name, _number_text(value)
        elif isinstance(value, (bool, dict, list)):
            yield name, json.dumps(value, default=float, ensure_ascii=False)
        else:
            yield name, str(value)


def _number_text(value: Decimal) -> str:
    """Return a double in the text form of states; another number, such as a long decimal, with all its digits."""
    if Decimal(repr(float(value))) == value:
        return float_text(float(value)).decode()
    return format(value, "f")
