"""MEMORY: the memory of a server's processes, as the operating system counts it. MEMORY USAGE is in `object`.

The numbers are those of INFO. The dataset is the size of the stores on disk; only pages that are read are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from resp_server.command.handler import command, worker_query
from resp_server.commands.info import process_memory
from resp_server.metrics.process_stats import ProcessStats
from resp_server.pipeline.context import CommandContext, ServerContext, ok
from resp_server.protocol.replies import Frames, Reply, Verbatim, encode
from state_backend.process_memory import release_free_memory

# MEMORY DOCTOR does not report below this size, as in Redis.
SMALL_BYTES = 5 << 20
# Above these MEMORY DOCTOR reports an issue (guesses, as in Redis).
OUTPUT_PER_CLIENT_BYTES = 200 << 10
PEAK_SHARE = 1.5
FREE_SHARE = 1.0

# Keys are in the stores' B+trees, not in hash tables.
HASH_TABLES = {b"overhead.hashtable.main": 0, b"overhead.hashtable.expires": 0}
# The overheads of Redis' allocator. Here there are none, because the operating system counts the memory.
OVERHEADS = (b"allocator-fragmentation", b"allocator-rss", b"rss-overhead")

EMPTY = (
    "Hi Sam, this instance is empty or is using very little memory, my issues detector can't be used in these "
    "conditions. Please, leave for your mission on Earth and fill it with some data. The new Sam and I will be back to "
    "our programming as soon as I finished rebooting.\n"
)
NO_ISSUE = "Hi Sam, I can't find any memory issue in your instance. I can only account for what occurs on this base.\n"


@command("memory|stats")
def memory_stats(context: CommandContext) -> Reply:
    """Returns details about memory usage."""
    return _made_once(
        context,
        "memory|stats",
        lambda: context.server.gather(process_memory, None, lambda responses: _stats(context, _total(responses))),
    )


def _made_once(context: CommandContext, name: str, make: Callable[[], Reply]) -> Reply:
    """Return a reply that is made once for each renewal of the view, for each user and version of the protocol.

    The requests of one round see one state of the server. Other processes' numbers are asked for each time.
    """
    server, protocol = context.server, context.session.protocol
    if server.workers is not None:
        return make()
    key = server.view, server.view.renewals, protocol, context.user
    made_for, reply = server.reply_cache.by_command.get(name, (None, Frames(b"")))
    if made_for != key:
        reply = Frames(encode(make(), protocol))
        server.reply_cache.by_command[name] = key, reply
    return reply


def _total(responses: Sequence[Mapping[str, Any]]) -> ProcessStats:
    return ProcessStats.total(map(ProcessStats.from_json, responses))


def _stats(context: CommandContext, total: ProcessStats) -> Reply:
    used, started = total.resident_bytes, total.started_bytes
    overhead = min(used, total.private_bytes)
    visible_jobs = list(context.visibility_of(context.jobs).jobs())
    keys = sum(job.countable_keys for job in visible_jobs)
    stored, _ = stored_bytes(context)
    return {
        b"peak.allocated": total.resident_bytes_peak,
        b"total.allocated": used,
        b"startup.allocated": started,
        b"replication.backlog": 0,
        b"clients.slaves": 0,
        b"clients.normal": total.output_bytes,
        b"cluster.links": 0,
        b"aof.buffer": 0,
        b"lua.caches": 0,
        b"functions.caches": 0,
        **({b"db.0": HASH_TABLES} if keys else {}),
        b"overhead.db.hashtable.lut": 0,
        b"overhead.db.hashtable.rehashing": 0,
        b"overhead.total": overhead,
        b"db.dict.rehashing.count": 0,
        b"keys.count": keys,
        b"keys.bytes-per-key": stored // (keys or 1),
        b"dataset.bytes": stored,
        b"dataset.percentage": 100 * (used - overhead) / max(1, used - started),
        b"peak.percentage": 100 * used / (total.resident_bytes_peak or 1),
        **{b"allocator.%b" % name: used for name in (b"allocated", b"active", b"resident")},
        b"allocator.muzzy": 0,
        **{name + suffix: value for name in OVERHEADS for suffix, value in ((b".ratio", 1.0), (b".bytes", 0))},
        b"fragmentation": 1.0,
        b"fragmentation.bytes": 0,
    }


def stored_bytes(context: CommandContext) -> tuple[int, int]:
    """Return the bytes of all served jobs' stores on disk: in use, and in free pages."""
    sizes = [job.store.used_bytes() for job, _ in context.jobs.snapshots()]
    return sum(used for used, _ in sizes), sum(free for _, free in sizes)


@command("memory|doctor")
def memory_doctor(context: CommandContext) -> Reply:
    """Outputs a memory problems report."""

    def join(responses: Sequence[Any]) -> Reply:
        return Verbatim(report(_total(responses), *stored_bytes(context)).encode())

    return _made_once(context, "memory|doctor", lambda: context.server.gather(process_memory, None, join))


def report(total: ProcessStats, stored: int, free: int) -> str:
    """Return the report of MEMORY DOCTOR; its texts are Redis' where Redis has such an issue."""
    if stored < SMALL_BYTES:
        return EMPTY
    issues = []
    if total.resident_bytes_peak > PEAK_SHARE * total.resident_bytes:
        issues.append(
            "Peak memory: In the past this instance used more than 150% of the memory that is currently using. The "
            "system takes mapped pages back when it needs them; after a burst of large replies this is normal."
        )
    if total.output_bytes > OUTPUT_PER_CLIENT_BYTES * max(1, total.clients):
        issues.append(
            "Big client buffers: The clients output buffers in this instance are greater than 200K per client (on "
            "average). CLIENT LIST shows which clients do not take what they are sent (omem)."
        )
    if free > FREE_SHARE * stored:
        issues.append(
            "Free pages: The stores have more free pages than used ones. Compaction removes them after a while; "
            "if that does not happen, look for readers that pin an old epoch."
        )
    if not issues:
        return NO_ISSUE
    listed = "\n\n".join(f" * {each}" for each in issues)
    return (
        f"Sam, I detected a few issues in this sparkis instance memory implants:\n\n{listed}\n\n"
        "I'm here to keep you safe, Sam. I want to help you.\n"
    )


@command("memory|malloc-stats")
def memory_malloc_stats(context: CommandContext) -> Reply:
    """Returns the allocator statistics."""
    return Verbatim(b"Stats not supported for the current allocator")


@command("memory|purge")
def memory_purge(context: CommandContext) -> Reply:
    """Asks the allocator to release memory."""
    return context.server.gather(purge, None, ok)


@worker_query("purge")
def purge(server: ServerContext, nothing: None) -> None:
    """Let the C library return its unused memory to the system."""
    release_free_memory()


@command("memory|help")
def memory_help(context: CommandContext) -> Reply:
    """Returns helpful text about the different subcommands."""
    return context.server.table.help("memory")
