"""How far a query has read its topic."""

from __future__ import annotations

import json

from pyspark.sql.streaming.query import StreamingQuery

from compat.waiting import eventually
from tests.kafka.broker import Broker


def wait_until_read(query: StreamingQuery, kafka: Broker, topic: str) -> None:
    """Wait until a query has read all messages of its only topic."""
    ends = kafka.ends(topic)
    eventually(lambda: ends_read(query, topic), lambda found: found == ends, awaited="the end of the topic")
    query.processAllAvailable()


def ends_read(query: StreamingQuery, topic: str) -> dict[int, int]:
    """Return the end offset of each partition in the last batch with progress."""
    if (exception := query.exception()) is not None:
        raise exception
    if query.lastProgress is None:
        return {}
    [source] = query.lastProgress["sources"]
    ends = json.loads(source["endOffset"]) if isinstance(source["endOffset"], str) else source["endOffset"]
    return {int(partition): end for partition, end in (ends or {}).get(topic, {}).items()}
