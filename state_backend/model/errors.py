"""The errors of logs, stores and state declarations.

    SparkisError
    ├── DescriptorError          a state is declared in a way that cannot work
    ├── ChangeError              an invalid change: a key, field or value is too long, or of a wrong kind
    ├── SlotSetError             a set of slots is invalid
    ├── NewerFormatError         a newer version of sparkis wrote a file
    ├── LogError                 the change log
    │   ├── LogUnavailableError      its storage does not respond, or refuses
    │   ├── LogCorruptError          a listed file is missing, changed or unreadable
    │   ├── FencedWriterError        a newer writer has taken the job over
    │   ├── JobInUseError            another query's writer has the job and is alive
    │   ├── RewoundCheckpointError   a writer publishes an epoch below the last committed one
    │   └── EpochHoleError           an epoch is missing before another one
    ├── CheckpointError          the checkpoint of a query
    │   ├── CheckpointUnavailableError  its storage does not respond, refuses, or is of an unknown kind
    │   ├── CheckpointFormatError    a file is not in a form that sparkis knows
    │   │   └── CheckpointDamagedError  a checksum says that its bytes have changed
    │   ├── UnsupportedStateError    a format, provider or type that sparkis does not read
    │   └── PurgedVersionError       files of a version are gone; Spark removes old ones
    └── StoreError               a server's store of the state
        ├── WrongKindError           the key has a value of another kind
        ├── KeyConflictError         two states of a job made the same key
        ├── JobLoadingError          the key's job is being loaded
        ├── SlotLoadingError         the key's slot is not owned by its job's store yet
        ├── StoreFullError           no room on the disk or in the store's map
        └── StoreDamagedError        stored bytes are not those that were written

A message names the thing, what is wrong, and what to do.
"""

from __future__ import annotations


class SparkisError(Exception):
    """Any error that sparkis raises on purpose."""


class DescriptorError(SparkisError):
    """A state is declared in a way that cannot work; raised before anything is written."""


class ChangeError(SparkisError):
    """A change is invalid, for example too long; raised before its epoch is committed."""


class SlotSetError(SparkisError):
    """A set of slots is invalid, or its text is."""


class NewerFormatError(SparkisError):
    """A newer version of sparkis wrote a file, in a format that this version does not read."""


class LogError(SparkisError):
    """An operation on the change log failed."""


class LogUnavailableError(LogError):
    """The log's storage does not respond, or refuses; a retry may succeed."""


class LogCorruptError(LogError):
    """A file that an epoch lists is missing, of another size or checksum, or unreadable."""


class FencedWriterError(LogError):
    """A newer writer has taken the job over; this writer must not commit any more."""


class JobInUseError(LogError):
    """Another query's writer has the job and is alive; the job was not taken over."""


class RewoundCheckpointError(LogError):
    """A writer publishes an epoch below the last committed one."""


class EpochHoleError(LogError):
    """A writer publishes an epoch beyond the next one, or an epoch is missing in the log."""


class CheckpointError(SparkisError):
    """A query's checkpoint cannot be read."""


class CheckpointUnavailableError(CheckpointError):
    """The storage of a checkpoint does not respond, refuses, or is not known to sparkis."""


class CheckpointFormatError(CheckpointError):
    """A file of a checkpoint is not in a form that sparkis knows: a rare form, or bytes that were lost or changed."""

    advice = (
        "If the query runs on with it, the file is whole, and sparkis lacks its form: please report that. If not, "
        "restore the file from a copy"
    )

    def __str__(self) -> str:
        return f"{super().__str__()}. {self.advice}"


class CheckpointDamagedError(CheckpointFormatError):
    """A checksum says that bytes of a checkpoint's file have changed."""

    # Only a checksum proves that the file is lost: no other error may tell a user to give a checkpoint up.
    advice = "Restore the file from a copy; without one, start the query on a new checkpoint"


class UnsupportedStateError(CheckpointError):
    """State is stored in a version, by a provider or with a type that sparkis does not read."""


class PurgedVersionError(CheckpointError):
    """Files of a state's version are gone; a newer version may be readable."""


class StoreError(SparkisError):
    """An operation on the store failed."""


class WrongKindError(StoreError):
    """The key has a value of another kind than the reader requested."""


class KeyConflictError(StoreError):
    """Two states of one job made the same key."""


class JobLoadingError(StoreError):
    """The key belongs to a job that is still being loaded; a retry in a moment succeeds."""


class SlotLoadingError(StoreError):
    """The key is in a slot that the store does not own yet: it is being loaded; a retry may succeed soon."""


class StoreFullError(StoreError):
    """The disk or the store's map is full; the store stays at its last complete epoch."""


class StoreDamagedError(StoreError):
    """Stored bytes are not those that were written; the applier removes the store and rebuilds it from the log."""
