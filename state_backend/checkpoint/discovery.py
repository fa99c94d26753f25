"""Finds the checkpoints of queries below a folder, such as the storage of a pipeline (Spark Declarative Pipelines).

A checkpoint is a folder with the folders `offsets` and `commits`. In an object store it has no folder `commits` before
its first commit; its state and its sources are there. A pipeline has one for each flow and number:

    <storage>/_checkpoints/<catalog>/<schema>/<table>/<flow>/<number>
    <storage>/_checkpoints/<sink>/<flow>/<number>

The number is 0 at first. Each full refresh of the flow begins the next one, with a new query, and leaves the older ones
as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple, Protocol, Self
from urllib.parse import unquote

from state_backend.checkpoint.files import NUMBER
from state_backend.model.errors import CheckpointError

PIPELINE_FOLDER = "_checkpoints"
OFFSETS, COMMITS = "offsets", "commits"
OTHERS = {COMMITS, "state", "sources"}
# Sinks have no catalog and no schema; where a job's name has them, this stands in their place.
SINK = "sink"
# How far, and in how many folders, queries are looked for (guess).
DEPTH_MAX = 16
FOLDERS_MAX = 10_000
LOOKED_FOR = (
    "a query's checkpoint has the folders `offsets` and `commits` from its first micro-batch on, and those of a "
    "pipeline are in `_checkpoints` of its storage"
)


class Folder(Protocol):
    """A folder of some storage. Each call reads the storage again."""

    location: str

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, unordered."""

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in a folder, unordered."""

    def numbers(self, folder: str) -> list[int]:
        """Return the names in a folder that are numbers, in order."""

    def name(self, path: str) -> str:
        """Return a path's full name."""


class Flow(NamedTuple):
    """A flow of a pipeline: a query that writes into a table, or into a sink."""

    catalog: str
    schema: str
    table: str
    flow: str

    @classmethod
    def of(cls, location: str) -> Self | None:
        """Return the flow that has a checkpoint's location; None if it is not the checkpoint of a flow."""
        names = location.rstrip("/").split("/")
        if PIPELINE_FOLDER not in names or not NUMBER.fullmatch(names[-1]):
            return None
        start = len(names) - names[::-1].index(PIPELINE_FOLDER)
        *target, flow = map(unquote, names[start:-1] or [""])  # Spark writes a space as %20
        if not target:
            return None
        *catalog, schema = target[:-1] or [SINK, SINK]
        return cls(".".join(catalog) or schema, schema, target[-1], flow)

    @property
    def default_name(self) -> str:
        """The table, and the flow if it is not the table's own. It does not depend on other tables and flows."""
        return self.table if self.flow == self.table else f"{self.table}.{self.flow}"


class FoundQuery(NamedTuple):
    """A query below a folder.

    Args:
        path: What identifies the query: the path of its checkpoint below the folder, without the number of a flow.
        checkpoint: The path of its checkpoint below the folder.
    """

    path: str
    checkpoint: str


def is_checkpoint(folder: Folder) -> bool:
    """Return whether a folder is the checkpoint of a query that has begun a micro-batch."""
    return _is_checkpoint(folder.folders(""))


def _is_checkpoint(names: Collection[str]) -> bool:
    return OFFSETS in names and not OTHERS.isdisjoint(names)


def has_commit(folder: Folder, query: FoundQuery) -> bool:
    """Return whether a query has committed a micro-batch."""
    return bool(folder.numbers(f"{query.checkpoint}/{COMMITS}"))


def queries_below(folder: Folder) -> list[FoundQuery]:
    """Return the queries below a folder, in the order of their paths.

    Of a flow's numbers the last one with a committed micro-batch counts, so that a full refresh takes a query's place
    when it has a state. CheckpointError if the folder has too many folders.
    """
    numbers: dict[str, list[int]] = {}
    found = []
    for path in _checkpoints(folder):
        parent, _, name = path.rpartition("/")
        if Flow.of(folder.name(path)) is None:
            found.append(FoundQuery(path, path))
        else:
            numbers.setdefault(parent, []).append(int(name))
    for parent, each in numbers.items():
        runs = [FoundQuery(parent or ".", f"{parent}/{number}".lstrip("/")) for number in sorted(each, reverse=True)]
        found.append(next((run for run in runs if len(runs) == 1 or has_commit(folder, run)), runs[0]))
    return sorted(found)


def _checkpoints(folder: Folder) -> Iterator[str]:
    """Yield the paths of the checkpoints below a folder."""
    waiting, listed = [""], 0
    while waiting:
        path = waiting.pop()
        names, listed = folder.folders(path), listed + 1
        if listed > FOLDERS_MAX:
            raise CheckpointError(
                f"{folder.location} has more than {FOLDERS_MAX} folders in which a query's checkpoint could be: give a "
                f"folder that is nearer to the checkpoints"
            )
        if path and _is_checkpoint(names):
            yield path
        elif path.count("/") < DEPTH_MAX and "terms" not in names:  # a job of a log has terms
            waiting += (f"{path}/{name}".lstrip("/") for name in names if _may_have_queries(name))


def _may_have_queries(name: str) -> bool:
    """Return whether checkpoints may be in a folder: not in hidden ones, those of table formats, and partitions."""
    return not name.startswith(".") and "=" not in name and (name[0] != "_" or name.startswith("_checkpoint"))
