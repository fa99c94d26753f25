"""What may go wrong below the protocol and below Spark.

    SparkisError
    ├── DescriptorError          a state is declared in a way that cannot work
    ├── ChangeError              a change that cannot be: longer than keys, fields or values may be
    ├── KeyGroupsError           slots that cannot be, or are not written as slots are
    ├── LogError                 the change log
    │   ├── LogUnavailableError      its storage does not answer, or refuses
    │   ├── LogCorruptError          a listed file is missing, changed or unreadable
    │   ├── FencedWriterError        a newer writer took the job over
    │   ├── JobInUseError            another query's writer has the job and is alive
    │   ├── RewoundCheckpointError   an epoch below the last committed one
    │   └── EpochHoleError           an epoch beyond the next one
    └── StoreError               the store
        ├── WrongKindError           the key holds another kind of state
        ├── KeyConflictError         two states of a job made the same key
        ├── JobLoadingError          the key's job is being opened
        ├── SlotLoadingError         the key's slot is not owned by its job's store yet
        ├── StoreFullError           no room on the disk or in the store's map
        └── StoreDamagedError        what lies in the store is not what was written

A message names the thing, what was wrong, and what to do.
"""

from __future__ import annotations


class SparkisError(Exception):
    """Any error that sparkis raises on purpose."""


class DescriptorError(SparkisError):
    """A state is declared in a way that cannot work; raised before anything is written."""


class ChangeError(SparkisError):
    """A change that cannot be, because something in it is too long; raised before its epoch is committed."""


class KeyGroupsError(SparkisError):
    """Slots that cannot be, or are not written as slots are."""


class LogError(SparkisError):
    """The change log cannot do what was asked."""


class LogUnavailableError(LogError):
    """The log's storage does not answer, or refuses; trying again later may help."""


class LogCorruptError(LogError):
    """A file that an epoch lists is missing, of another size or checksum, or unreadable."""


class FencedWriterError(LogError):
    """A newer writer took the job over; this one must not commit any more."""


class JobInUseError(LogError):
    """Another query's writer has the job and is alive; it was not taken over."""


class RewoundCheckpointError(LogError):
    """An epoch below the last committed one was offered."""


class EpochHoleError(LogError):
    """An epoch beyond the next one was offered, or the chain of epochs misses one."""


class StoreError(SparkisError):
    """The store cannot do what was asked."""


class WrongKindError(StoreError):
    """The key holds another kind of state than the reader asked for."""


class KeyConflictError(StoreError):
    """Two states of one job made the same key."""


class JobLoadingError(StoreError):
    """The key belongs to a job that is not open yet; asking again in a moment helps."""


class SlotLoadingError(StoreError):
    """What is asked for lies in a slot that the store does not own, and is to: it is loaded, and may be there soon."""


class StoreFullError(StoreError):
    """No room left on the disk or in the store's map; the store stays at its last whole epoch."""


class StoreDamagedError(StoreError):
    """What lies in the store is not what was written; the applier throws it away and makes it anew from the log."""
