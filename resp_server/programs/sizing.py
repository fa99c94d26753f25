"""How much hardware a load needs: the arithmetic of `sparkis size`, from the costs of `unit_costs`. Pure.

A shard is a server with some of the slots, and its replicas. A server answers clients on one core. Each job has an
applier there, one process, which reads all of the job's changes and applies those of the server's slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from resp_server.programs import unit_costs as costs

PAGE_BYTES = 4096
# A log with several owners may have its snapshot interval rounded up to twice its length (docs/change-log.md).
ROUNDED_INTERVAL = 2
# A load that needs more servers does not fit one job; so many were never tried.
SHARDS_MAX = 1000


class SizeError(ValueError):
    """No number of servers suffices; the text says what to change."""


@dataclass(frozen=True)
class Load:
    """The load on the servers. Rates are per second.

    Args:
        share_used: The part of a core that may be busy.
        shuffled: The states have order_by or reduce, or are several.
        in_python: The states are neither values nor maps of several columns, or they expire.
    """

    keys: float
    updates: float
    reads: float
    key_bytes: int = costs.MEASURED_KEY_BYTES
    value_bytes: int = costs.MEASURED_VALUE_BYTES
    replicas: int = 0
    retention_minutes: float = 60
    pipeline: int = 1
    epoch_s: float = 1.0
    partitions: int = 64
    jobs: int = 1
    share_used: float = 2 / 3
    shuffled: bool = False
    in_python: bool = False


@dataclass(frozen=True)
class Estimate:
    """The hardware that a load needs. Bytes and cores are of one server unless `all` is in the name."""

    shards: int
    servers: int
    serving_cores: float
    applying_cores: float
    proxies: int
    writing_cores_all: float
    store_bytes: float
    store_bytes_all: float
    disk_bytes: float
    memory_bytes_min: float
    memory_bytes: float
    log_bytes_per_s: float
    log_files_per_s: float
    log_bytes_max: float
    log_read_bytes_per_s_all: float
    log_reads_per_s_all: float
    client_bytes_in_per_s_all: float
    client_bytes_out_per_s_all: float
    warnings: tuple[str, ...] = field(default=())


def estimate(load: Load) -> Estimate:
    """Return the hardware that a load needs; SizeError if no number of servers suffices."""
    applying = (costs.APPLYING_IN_PYTHON if load.in_python else costs.APPLYING).value
    shards = max(
        _shards_for_updates(load, applying), _at_least_one(_busy(load.reads, reading_us(load)) / load.share_used)
    )
    servers = shards * (1 + load.replicas)
    data = load.keys * store_bytes_of_a_key(load)
    store = data / shards
    dirty = _dirty_bytes(store, load.updates * load.epoch_s / shards)
    processes = costs.SUPERVISOR.value + costs.SERVER.value + load.jobs * costs.APPLIER.value
    change = change_bytes(load)
    written = load.updates * change
    files = load.jobs * (load.partitions + 1) / load.epoch_s if load.updates else 0.0
    size = Estimate(
        shards=shards,
        servers=servers,
        serving_cores=_busy(load.reads, reading_us(load)) / shards,
        applying_cores=_applying_cores(load, applying, shards),
        proxies=math.ceil(_busy(load.reads, costs.GET_AT_A_PROXY[load.pipeline].value) / load.share_used),
        writing_cores_all=_busy(load.updates, costs.WRITING.value + (costs.SHUFFLE.value if load.shuffled else 0.0)),
        store_bytes=store,
        store_bytes_all=data * (1 + load.replicas),
        # The data, its free pages, and the copy that removes these.
        disk_bytes=store * (2 + costs.FREE_PAGES.value),
        memory_bytes_min=processes + dirty,
        memory_bytes=processes + dirty + store,
        log_bytes_per_s=written,
        log_files_per_s=files,
        log_bytes_max=_log_bytes(load, written, load.keys * change, shards),
        log_read_bytes_per_s_all=written * servers,
        log_reads_per_s_all=files * servers,
        client_bytes_in_per_s_all=load.reads * request_bytes(load.key_bytes),
        client_bytes_out_per_s_all=load.reads * reply_bytes(load.value_bytes),
    )
    return _with_warnings(size)


def reading_us(load: Load) -> float:
    """Return what a GET takes of a server's core, in microseconds."""
    return costs.GET_AT_A_SERVER[load.pipeline].value


def change_bytes(load: Load) -> float:
    """Return the bytes of a change in the log."""
    return costs.LOG_BYTES_OF_A_CHANGE.value + load.key_bytes + load.value_bytes


def store_bytes_of_a_key(load: Load) -> float:
    """Return the bytes of a key in a store's file, at rest."""
    return (costs.RECORD_BYTES_OF_A_KEY.value + load.key_bytes + load.value_bytes) / costs.PAGES_FILLED.value


def request_bytes(key_bytes: int) -> int:
    """Return the bytes of a GET in RESP."""
    return len(b"*2\r\n$3\r\nGET\r\n$%d\r\n\r\n" % key_bytes) + key_bytes


def reply_bytes(value_bytes: int) -> int:
    """Return the bytes of the reply to a GET in RESP."""
    return len(b"$%d\r\n\r\n" % value_bytes) + value_bytes


def _busy(per_s: float, us: float) -> float:
    """Return how many cores are busy with a rate of operations per second that take some microseconds each."""
    return per_s * us / 1e6


def _at_least_one(number: float) -> int:
    # A result less than a millionth above a whole number is a rounding error.
    return max(1, math.ceil(number - 1e-6))


def _applying_cores(load: Load, applying_us: float, shards: int) -> float:
    """Return the busy cores of a server's appliers; each job has one."""
    foreign = _busy(load.updates * (shards - 1) / shards, costs.READING_FOREIGN.value)
    return _busy(load.updates / shards, applying_us) + foreign


def _shards_for_updates(load: Load, applying_us: float) -> int:
    """Return the least number of shards whose appliers keep up."""
    # The busiest part of an applier is the same for every number of shards: it reads all changes of its job.
    room = load.share_used * load.jobs - _busy(load.updates, costs.READING_FOREIGN.value)
    own = _busy(load.updates, applying_us - costs.READING_FOREIGN.value)
    shards = _at_least_one(own / room) if room > 0 else SHARDS_MAX + 1
    if shards > SHARDS_MAX:
        shared = "one job" if load.jobs == 1 else f"{load.jobs} jobs"
        raise SizeError(
            f"{load.updates:,.0f} updates a second are too many for {shared}, because every server's applier reads all "
            "changes of its job; publish from more jobs (--jobs)"
        )
    return shards


def _dirty_bytes(store_bytes: float, changes: float) -> float:
    """Return the memory for an epoch's writes: the pages that so many changes in random places touch."""
    pages = store_bytes / PAGE_BYTES
    return PAGE_BYTES * pages * (1 - math.exp(-changes / pages)) if pages else 0.0


def _log_bytes(load: Load, written_per_s: float, snapshot_bytes: float, shards: int) -> float:
    """Return the most bytes that a compacted log has."""
    if not written_per_s:
        return 2 * snapshot_bytes
    by_bytes = costs.SNAPSHOT_AFTER.value * snapshot_bytes / written_per_s
    interval_s = min(by_bytes, costs.SNAPSHOT_EPOCHS.value * load.epoch_s) * (ROUNDED_INTERVAL if shards > 1 else 1)
    retention_s = load.retention_minutes * 60
    if interval_s > retention_s:
        return 2 * snapshot_bytes + written_per_s * 2 * interval_s
    kept_s = costs.RETENTIONS_KEPT.value * retention_s + interval_s
    return costs.SNAPSHOTS_KEPT.value * snapshot_bytes + written_per_s * kept_s


def _with_warnings(size: Estimate) -> Estimate:
    return Estimate(**{**vars(size), "warnings": tuple(_warnings(size))})


def _warnings(size: Estimate) -> Iterator[str]:
    """Yield what becomes a bottleneck first (docs/scale.md)."""
    if size.log_reads_per_s_all > costs.OBJECT_READS.value:
        yield (
            f"servers open {size.log_reads_per_s_all:,.0f} files of the log a second; an object store serves some "
            f"{costs.OBJECT_READS.value:,.0f} below one prefix: fewer partitions, longer epochs, or several logs"
        )
    if size.log_read_bytes_per_s_all > costs.FILE_SERVER.value:
        yield (
            f"servers read {size.log_read_bytes_per_s_all / 1e9:.1f} GB of the log a second, because each reads all "
            "changes; a file server delivers perhaps 1 GB: fewer servers, or several logs"
        )
