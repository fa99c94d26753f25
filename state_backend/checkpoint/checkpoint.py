"""A query's checkpoint as a whole: its batches, its operators and states, whole states and the changes of a batch.

A batch is committed when it has a commit file. Its other files exist earlier, so take a batch from `newest_batch`, then
read. Spark removes old batches at any time; reading a removed file raises PurgedVersionError.

    checkpoint = Checkpoint.at(path)
    batch_stores = checkpoint.batch_stores(batch)     # operators, stores, states, partitions
    for store in batch_stores.stores:
        for partition in store.partitions():
            for state, rows in store.whole(partition, batch): ...
            for state, rows in store.changes(partition, batch + 1): ...

Whole states and changes are Arrow batches of bounded size (see `decoding.decoded`), partition after partition. A store
is read once for all of its states.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Self

from state_backend.checkpoint import metadata
from state_backend.checkpoint.compression import unreadable
from state_backend.checkpoint.files import NUMBER, CheckpointFiles
from state_backend.checkpoint.metadata import BatchCommit, BatchOffsets, OperatorInfo, StoreInfo
from state_backend.checkpoint.schemas import StoreSchema, parse_store_schemas
from state_backend.checkpoint.states import DEFAULT_STORE, State, UnreadableState, has_states, infer_operator, states_of
from state_backend.checkpoint.stores import PROVIDERS, StateStore, store_folder
from state_backend.model.errors import (
    CheckpointError,
    PurgedVersionError,
    UnsupportedStateError,
)

PREFIX = "spark.sql.streaming.stateStore."
PROVIDER, ENCODING, ROW_CHECKSUMS = f"{PREFIX}providerClass", f"{PREFIX}encodingFormat", f"{PREFIX}rowChecksum.enabled"
DEFAULT_PROVIDER, DEFAULT_ENCODING = "HDFSBackedStateStoreProvider", "unsaferow"
# Other packages have providers of the same names, such as Databricks' own: their files are not known.
PROVIDERS_PACKAGE = "org.apache.spark.sql.execution.streaming.state."
PARTITIONS = "spark.sql.shuffle.partitions"
AGGREGATION_FORMAT = "spark.sql.streaming.aggregation.stateFormatVersion"
# The settings of Spark that say how the state is stored.
STATE_STORE_SETTINGS = (PROVIDER, ENCODING, ROW_CHECKSUMS, PARTITIONS, AGGREGATION_FORMAT)
REMEDY = (
    "sparkis reads checkpoints of Spark 3.1 and later. Once such a version, say 3.5, has continued the query on this "
    "checkpoint for a micro-batch, sparkis reads it"
)
# A setting that Spark writes into a batch's plan since 3.1, the first version that writes schemas of state.
CODEC = f"{PREFIX}compression.codec"
STATE_FILE = re.compile(r"\d+\.(delta|snapshot|changelog|zip)")
SCHEMA_FOLDER = "_stateSchema"
# Commits that are cached with a batch: its own, the one before it, and some that are read at the same time.
COMMITS_CACHED = 4


@dataclass(frozen=True)
class BatchStores:
    """The state of a query as of a batch.

    Args:
        operators: Also those without a readable state.
        unread: The operators and variables that sparkis does not know how to read.
        has_metadata: Whether the operators have metadata, which Spark writes since 4.0.
        partition_count: Changes if the state is repartitioned; some partitions may have no rows yet, and no files.
    """

    batch: int
    provider: str
    has_metadata: bool
    partition_count: int
    operators: tuple[OperatorInfo, ...]
    stores: tuple[StateStore, ...]
    unread: tuple[UnreadableState, ...] = ()

    def check(self) -> None:
        """Raise UnsupportedStateError if the query has state, and none of it can be read."""
        if self.unread and not self.stores:
            raise UnsupportedStateError("; ".join(str(each) for each in self.unread))

    @property
    def states(self) -> list[State]:
        """All readable states."""
        return [state for store in self.stores for state in store.states]

    def only(self, chosen: Collection[tuple[int, str]]) -> Self:
        """Return the stores with some states, by operator and name, and with no other stores than theirs."""
        stores = (
            replace(store, states=tuple(state for state in store.states if (state.operator, state.name) in chosen))
            for store in self.stores
        )
        return replace(self, stores=tuple(store for store in stores if store.states))


class Checkpoint:
    """The checkpoint of one query. It reads the files anew in each call, and is safe to use in several threads."""

    def __init__(self, files: CheckpointFiles) -> None:
        self._files = files
        self.location = files.location

    @classmethod
    def at(cls, location: str) -> Self:
        """Return the checkpoint at a path or address; CheckpointError if it is none."""
        checkpoint = cls(CheckpointFiles.at(location))
        checkpoint.query_id  # noqa: B018  # raises the error
        return checkpoint

    @property
    def query_id(self) -> str:
        """The query's id, which stays the same over restarts; read anew each time."""
        stored = self._files.read("metadata")
        if stored is None:
            reason = "it has no file `metadata`" if self._files.names("") else "it is empty, or does not exist"
            raise CheckpointError(
                f"{self.location} is not the checkpoint of a query: {reason}. Give the folder that the query has as "
                f"its option checkpointLocation"
            )
        return metadata.parse_query_id(stored, self._files.name("metadata"))

    def batches(self) -> list[int]:
        """Return the committed batches that Spark has not removed, in order."""
        return self._files.numbers("commits")

    def newest_batch(self) -> int | None:
        """Return the last committed batch; None if there is none.

        UnsupportedStateError: Spark 2.1 wrote the checkpoint, without commits.
        """
        newest = max(self.batches(), default=None)
        if newest is None and self._is_without_commits():
            raise UnsupportedStateError(
                f"{self.location} has offsets of several batches and no folder commits: Spark 2.1 wrote it, and a "
                f"reader cannot tell which of its batches are complete. {REMEDY}"
            )
        return newest

    def _is_without_commits(self) -> bool:
        """Return whether Spark 2.1 wrote the checkpoint. Later versions plan a batch after the last one's commit."""
        planned = self._files.numbers("offsets")
        if len(planned) < 2 or "commits" in self._files.names(""):
            return False
        return CODEC not in self.offsets(planned[-1]).settings

    def is_committed(self, batch: int) -> bool:
        """Return whether a batch is committed, and not removed. Checks one file."""
        return self._files.size(f"commits/{batch}") is not None

    @property
    def plans_folder(self) -> str:
        """The folder in which batches are planned."""
        return self._files.name("offsets")

    def is_planned(self, batch: int) -> bool:
        """Return whether Spark has planned a batch, and not removed it. Checks one file."""
        return self._files.size(f"offsets/{batch}") is not None

    def commit(self, batch: int) -> BatchCommit:
        """Return a batch's commit; PurgedVersionError if it has none."""
        path = f"commits/{batch}"
        return metadata.parse_commit(self._required(path), self._files.name(path))

    def offsets(self, batch: int) -> BatchOffsets:
        """Return the header of a batch's offsets: its time, its watermark, its settings."""
        path = f"offsets/{batch}"
        return metadata.parse_offsets(self._required(path), self._files.name(path))

    def partition_count(self, batch: int) -> int:
        """Return the number of partitions of the state as of a batch."""
        return self._partition_count(batch, self.offsets(batch).settings)

    def _partition_count(self, batch: int, settings: Mapping[str, str]) -> int:
        stored = settings.get(PARTITIONS, "")
        if not NUMBER.fullmatch(stored):
            name = self._files.name(f"offsets/{batch}")
            raise unreadable(name, f"it names no number of partitions ({PARTITIONS})")
        return int(stored)

    def source_offsets(self, batch: int) -> tuple[str, ...]:
        """Return the end offset of each source in a batch; () if unknown."""
        stored = self._files.read(f"offsets/{batch}")
        return () if stored is None else metadata.end_offsets(stored.decode(errors="replace"))

    def batch_stores(self, batch: int, settings: Mapping[str, str] | None = None) -> BatchStores:
        """Return the operators and states as of a committed batch, and the states that sparkis cannot read.

        Args:
            settings: Those of Spark, for a batch that has no offsets yet: see STATE_STORE_SETTINGS.
        """
        if settings is None:
            settings = self.offsets(batch).settings
        provider = _provider_of(settings)
        refusal = self._refusal(settings)
        has_checksums = settings.get(ROW_CHECKSUMS, "false").lower() == "true"
        count = self._partition_count(batch, settings)
        # All partitions of a batch share its commit.
        commit_of = lru_cache(COMMITS_CACHED)(self.commit)
        operators, stores, unread, has_metadata = [], [], [], False
        for number in self._files.numbers("state"):
            names = self._files.names(f"state/{number}")
            has_metadata |= "_metadata" in names
            operator, found, not_found = self._states(number, batch, settings)
            operators.append(operator)
            if refusal is not None and (found or not_found):
                found, not_found = [], [UnreadableState(number, operator.name, None, refusal)]
            unread += not_found
            # After a repartition, folders of other partitions remain.
            partitions = sorted(int(name) for name in names if NUMBER.fullmatch(name) and int(name) < count)
            indices = {store.name: index for index, store in enumerate(operator.stores)}
            for store, states in groupby(found, key=lambda state: state.store):
                stores.append(
                    StateStore(
                        self._files,
                        PROVIDERS[provider],
                        number,
                        store,
                        tuple(states),
                        indices.get(store, 0),
                        has_checksums,
                        tuple(partitions),
                        commit_of,
                    )
                )
        return BatchStores(batch, provider, has_metadata, count, tuple(operators), tuple(stores), tuple(unread))

    def _refusal(self, settings: Mapping[str, str]) -> str | None:
        """Return why no state can be read: the provider, or the encoding. None if they are known."""
        if _provider_of(settings) not in PROVIDERS:
            return (
                f"{self.location}: the state store provider {settings[PROVIDER]} is not known to sparkis, which reads "
                f"{' and '.join(PROVIDERS)}"
            )
        if settings.get(ENCODING, DEFAULT_ENCODING).lower() != DEFAULT_ENCODING:
            return (
                f"{self.location}: the state is encoded as {settings[ENCODING]}, which sparkis does not read without "
                f"Spark; it reads {DEFAULT_ENCODING}, the default of {ENCODING}. Attach to it with reader='spark' "
                f"(--reader spark)"
            )
        return None

    def _states(
        self, number: int, batch: int, settings: Mapping[str, str]
    ) -> tuple[OperatorInfo, list[State], list[UnreadableState]]:
        """Return an operator, its states, and the states that cannot be read."""
        operator = OperatorInfo(number, "", ())
        try:
            described = self._operator(number, batch)
            operator, schemas = self._inferred(number, settings) if described is None else (described, None)
            if schemas is None:
                # An operator that is not known may have stores of another form.
                schemas = self._schemas_of(operator) if has_states(operator.name) else {}
            found, unread = states_of(operator, schemas, self._files.name(f"state/{number}"))
        except UnsupportedStateError as error:
            return operator, [], [UnreadableState(number, operator.name, None, str(error))]
        return operator, found, unread

    def _operator(self, number: int, batch: int) -> OperatorInfo | None:
        """Return an operator; None if it has no metadata."""
        folder = f"state/{number}"
        versions = [each for each in self._files.numbers(f"{folder}/_metadata/v2") if each <= batch]
        path = f"{folder}/_metadata/v2/{versions[-1]}" if versions else f"{folder}/_metadata/metadata"
        stored = self._files.read(path)
        return None if stored is None else metadata.parse_operator(stored, self._files.name(path))

    def _schemas_of(self, operator: OperatorInfo) -> dict[str, list[StoreSchema]]:
        """Return the schemas of an operator's stores."""
        schemas = {}
        for store in operator.stores:
            if store.schema_paths:
                path = self._path_here(store.schema_paths[-1], f"state/{operator.number}")
            else:
                path = f"{store_folder(operator.number, 0, store.name)}/_metadata/schema"
            schemas[store.name] = self._schemas(path, store.prefix_columns)
        return schemas

    def _inferred(self, number: int, settings: Mapping[str, str]) -> tuple[OperatorInfo, dict[str, list[StoreSchema]]]:
        """Return an operator of Spark 3.5, inferred from the schemas of its stores, and the schemas."""
        folder = f"state/{number}/0"
        names = self._files.names(folder)
        is_default = "_metadata" in names or any(map(STATE_FILE.fullmatch, names))
        stores = [DEFAULT_STORE] if is_default else sorted(name for name in names if name.count("-") == 1)
        if not stores:
            raise PurgedVersionError(f"{self._files.name(folder)} has no schema: the query has not written its state")
        paths = {name: f"{store_folder(number, 0, name)}/_metadata/schema" for name in stores}
        for path in paths.values():
            if self._files.size(path) is None:
                raise self._without_schema(path, settings)
        schemas = {name: self._schemas(path) for name, path in paths.items()}
        has_keys = settings.get(AGGREGATION_FORMAT, "1") == "1"
        operator, prefix_columns = infer_operator(schemas, aggregations_have_keys=has_keys)
        if prefix_columns:
            schemas = {name: self._schemas(path, prefix_columns) for name, path in paths.items()}
        infos = tuple(StoreInfo(name, prefix_columns) for name in stores)
        return OperatorInfo(number, operator, infos), schemas

    def _without_schema(self, path: str, settings: Mapping[str, str]) -> UnsupportedStateError:
        """Return the error for state without a schema: Spark before 3.1 wrote it, or a copy lacks the schema."""
        name = self._files.name(path)
        if CODEC in settings:
            return UnsupportedStateError(
                f"{name} is missing, and the version of Spark that ran the query writes it: was the checkpoint copied "
                f"without the folders whose names begin with `_`? Copy all of it"
            )
        return UnsupportedStateError(
            f"{name} is missing: Spark 3.0 or older wrote this state, without a schema. {REMEDY}"
        )

    def _schemas(self, path: str, prefix_columns: int = 0) -> list[StoreSchema]:
        return parse_store_schemas(self._required(path), self._files.name(path), prefix_columns)

    def _path_here(self, path: str, folder: str) -> str:
        """Return a schema's path in this checkpoint: the metadata has the absolute path that the query used."""
        parts = path.split("/")
        if SCHEMA_FOLDER not in parts or ".." in parts or len(parts) - parts.index(SCHEMA_FOLDER) != 3:
            raise CheckpointError(
                f"{self._files.name(folder)}: its metadata names the schema {path!r}, which is no path"
            )
        return "/".join([folder, *parts[parts.index(SCHEMA_FOLDER) :]])

    def _required(self, path: str) -> bytes:
        stored = self._files.read(path)
        if stored is None:
            raise PurgedVersionError(f"{self._files.name(path)} is gone: Spark has removed it, or it was never written")
        return stored


def _provider_of(settings: Mapping[str, str]) -> str:
    """Return the provider's class, without the package of Spark's own ones."""
    return settings.get(PROVIDER, DEFAULT_PROVIDER).removeprefix(PROVIDERS_PACKAGE)
