"""The data set as a change log for servers under test; the only module here that writes as a job does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from compat.conformance.dataset import Dataset
from state_backend.codec import packed_map
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

JOB = "job"
TEXT = "text"
STATES = (
    StateDescriptor(TEXT, key="key", value="value"),
    StateDescriptor("map", key="key", value="value", field="field"),
    StateDescriptor("list", key="key", value="value", kind="list"),
    StateDescriptor("set", key="key", member="member"),
    StateDescriptor("ranks", key="key", member="member", score="score"),
)
# A member that every set has for one epoch only.
PASSING = b"member:00000.5"


def dataset_writer(root: Path) -> LogWriter:
    """Open a log under a root for writing; the caller closes it."""
    return LogWriter(root, JOB, STATES)


def publish(dataset: Dataset, writer: LogWriter) -> None:
    """Write a data set in several epochs, some of which overwrite or delete values of earlier ones."""
    writer.publish([Change(TEXT, Op.PUT, b"gone", value=b"deleted by a later epoch")])
    writer.publish([Change(TEXT, Op.PUT, key, value=b"overwritten") for key in list(dataset.strings)[::2]])
    writer.publish([*_values(dataset), *_maps(dataset), Change(TEXT, Op.DELETE, b"gone")])
    for half in (0, 1):
        writer.publish([*_elements(dataset, half), *_members(dataset, half)])


def _values(dataset: Dataset) -> Iterator[Change]:
    for key, value in dataset.strings.items():
        yield Change(TEXT, Op.PUT, key, value=value, expire_at_ms=dataset.expire_at_ms.get(key))


def _maps(dataset: Dataset) -> Iterator[Change]:
    """Return the changes that put maps: field by field, or completely for a map that expires."""
    for key, fields in dataset.hashes.items():
        if key in dataset.expire_at_ms:
            packed = packed_map.pack(fields.items())
            yield Change("map", Op.PUT, key, value=packed, expire_at_ms=dataset.expire_at_ms[key])
        else:
            for name, value in fields.items():
                yield Change("map", Op.PUT, key, name, value)


def _elements(dataset: Dataset, half: int) -> Iterator[Change]:
    """Return the changes that append half of each list's elements. A list's expiry is that of its last change."""
    for key, elements in dataset.lists.items():
        middle = len(elements) // 2
        for element in elements[middle:] if half else elements[:middle]:
            yield Change("list", Op.APPEND, key, value=element, expire_at_ms=dataset.expire_at_ms.get(key))


def _members(dataset: Dataset, half: int) -> Iterator[Change]:
    """Return the changes that add half of each set's members. The first half also adds PASSING, the second removes it.

    A set's expiry is that of its last change.
    """
    kinds = {
        "set": {key: dict.fromkeys(members, b"") for key, members in dataset.sets.items()},
        "ranks": dataset.sorted_sets,
    }
    for state, kind in kinds.items():
        for key, members in kind.items():
            middle, expire_at_ms = len(members) // 2, dataset.expire_at_ms.get(key)
            for member, score in list(members.items())[middle:] if half else list(members.items())[:middle]:
                yield Change(state, Op.PUT, key, member, score, expire_at_ms)
            if not half:
                yield Change(state, Op.PUT, key, PASSING, b"" if state == "set" else b"9", expire_at_ms)
            else:
                yield Change(state, Op.DELETE, key, PASSING)
