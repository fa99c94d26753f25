"""A job whose keys have other names for clients."""

from __future__ import annotations

from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from tests.server.overlay import Overlay

STATES = [
    StateDescriptor("byAccount", key="account", value="score"),
    StateDescriptor("facts", key="account", field="metric", value="n"),
]


def publish(overlay: Overlay, *changes: Change) -> None:
    with LogWriter(overlay.log, "golden", STATES, "first-of-golden") as writer:
        writer.publish(list(changes))


def score(account: int, value: bytes) -> Change:
    return Change("byAccount", Op.PUT, b"golden:byAccount:%d" % account, value=value)


def fact(account: int, value: bytes) -> Change:
    return Change("facts", Op.PUT, b"golden:facts:%d" % account, field=b"apdex", value=value)
