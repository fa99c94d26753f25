"""The facts of a query's last finished micro-batch as one hash, `job:_progress`: what dashboards ask first.

They are Spark's own, `query.lastProgress`, which is there once a micro-batch has ended: an epoch brings those of the
micro-batch before it. They cost no Spark job, and are no part of what a replayed micro-batch is recognised by.
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


def is_asked_for(session: SparkSession, given: bool | None) -> bool:
    """Tell whether a query's facts are to be published: by the argument, else by the session's setting."""
    if given is not None:
        return bool(given)
    setting = session.conf.get(SETTING, None) or "false"
    if setting not in ("true", "false"):
        raise DescriptorError(f"{SETTING} is true or false, not {setting!r}")
    return setting == "true"


def check_apart(job: str, states: Sequence[StateDescriptor]) -> None:
    """Raise DescriptorError if a state's keys could be the key of the facts."""
    mine = state_of(job).format_for(job)
    for state in states:
        if state.format_for(job).overlaps(mine):
            raise DescriptorError(
                f"state {state.name!r} of job {job!r} could make the key {mine.text!r}, where progress=True puts the "
                f"query's facts; give the state a key format that begins differently, or leave out progress="
            )


def state_of(job: str) -> StateDescriptor:
    """Return the state that holds a job's facts."""
    return StateDescriptor(STATE, key_format=f"{job}:{STATE}", field="fact", value="value")


def stream_of(job: str, query: StreamingQuery) -> bytes | None:
    """Return the facts of a query's last micro-batch as inline changes of an epoch; None if none has ended yet."""
    last = query.lastProgress
    if last is None:
        return None
    facts = facts_of(json.loads(last.json, parse_float=Decimal))
    packed = packed_map.pack((name.encode(), value.encode()) for name, value in facts.items())
    change = Change(STATE, Op.PUT, f"{job}:{STATE}".encode(), None, packed)
    return to_stream(list(runs_of([change], [STATE])))


def facts_of(progress: dict[str, Any]) -> dict[str, str]:
    """Return what a progress report says, by the names that readers see; what it does not say is left out."""
    operators = progress.get("stateOperators", ())
    found: dict[str, Any] = {
        "batch": progress["batchId"],
        "run_id": progress["runId"],
        "timestamp": progress["timestamp"],
        "batch_duration_ms": progress.get("batchDuration"),
        "input_rows": sum(source["numInputRows"] for source in progress["sources"]),
        "input_rows_per_second": _added(progress["sources"], "inputRowsPerSecond"),
        "processed_rows_per_second": _added(progress["sources"], "processedRowsPerSecond"),
    }
    for name, value in progress.get("eventTime", {}).items():
        found["watermark" if name == "watermark" else f"event_time_{name}"] = value
    if operators:
        found["state_rows"] = sum(each["numRowsTotal"] for each in operators)
        found["state_rows_updated"] = sum(each["numRowsUpdated"] for each in operators)
        found["state_rows_dropped_by_watermark"] = sum(each["numRowsDroppedByWatermark"] for each in operators)
        found["state_memory_bytes"] = sum(each["memoryUsedBytes"] for each in operators)
    for name, metrics in progress.get("observedMetrics", {}).items():
        found |= {f"observed.{name}.{metric}": value for metric, value in metrics.items()}
    return dict(_texts(found))


def _added(sources: Sequence[dict[str, Any]], name: str) -> Decimal | None:
    """Return a rate over all sources; None where none is told, as in a query's first micro-batch."""
    told = [Decimal(source[name]) for source in sources if isinstance(source.get(name), (int, Decimal))]
    return sum(told, Decimal(0)) if told else None


def _texts(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in found.items():
        if value is None:
            continue
        if isinstance(value, Decimal):
            yield name, _number(value)
        elif isinstance(value, (bool, dict, list)):
            yield name, json.dumps(value, default=float, ensure_ascii=False)
        else:
            yield name, str(value)


def _number(value: Decimal) -> str:
    """Return a double as a state shows it; what is no double, such as a long decimal, digit for digit."""
    if Decimal(repr(float(value))) == value:
        return float_text(float(value)).decode()
    return format(value, "f")
