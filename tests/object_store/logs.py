"""Writers of a log in an object store, and the requests that they cost."""

from __future__ import annotations

from collections import Counter
from typing import Any

from compat.object_store.faulty_proxy import FaultyProxy
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

STATE = StateDescriptor("count", key="k", value="v", reduce="sum", columns={"v": "bigint"})


def one(key: int, by: int = 1) -> Change:
    """Return a change that is seen if it is lost or done twice."""
    return Change("count", Op.FOLD, b"job:count:%d" % key, None, b"%d" % by)


def writer_of(root: str, **more: Any) -> LogWriter:
    return LogWriter(root, "job", [STATE], "q1", **more)


def methods(proxy: FaultyProxy) -> Counter[str]:
    """Count the requests since the last call; a listing is a GET that costs as much as a PUT."""
    requests = proxy.taken()
    return Counter("LIST" if "list-type" in path else method for method, path in requests)
