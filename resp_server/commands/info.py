"""INFO: the server's statistics by Redis' names, and two sections of our own: Sparkis (jobs) and Proxy."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from resp_server.acl.visibility import VisibleJob
from resp_server.command.handler import command, worker_query
from resp_server.commands.job_facts import info_row_of, info_text
from resp_server.commands.server import last_save_s
from resp_server.metrics.process_stats import ProcessStats
from resp_server.metrics.stats import Stats
from resp_server.native import CORE
from resp_server.net import event_loop
from resp_server.pipeline.context import CommandContext, ServerContext
from resp_server.protocol.replies import Reply, Verbatim
from resp_server.session.subscriptions import SubscriptionKind
from resp_server.settings.server import REDIS_VERSION
from state_backend import VERSION
from state_backend.store.store import AppliedEpoch, Snapshot

Section = Mapping[str, object]

# Standard: Redis' LRU clock has 24 bits, in seconds.
LRU_CLOCK_MAX = (1 << 24) - 1
# Clients that wait for the end of loading see this estimate (guess); the remaining time is not known.
LOADING_ETA_S = 1
PERCENTILES = (50, 99, 99.9)
# The keys of one sample, and how many samples are taken until enough keys with a TTL are found: a millisecond at most
# (measured: 0.4 us a key, 2.5 us with a TTL), ten milliseconds with many jobs.
SAMPLE_KEYS, SAMPLE_TTLS, SAMPLE_TRIES = 256, 32, 4
SAMPLED_JOBS_MAX = 10
# The reasons of ACL LOG, by the suffixes of the fields `acl_access_denied_...`.
DENIED = {"auth": "auth", "cmd": "command", "key": "key", "channel": "channel"}


@command("info")
def info(context: CommandContext, *names: bytes) -> Reply:
    """Returns information and statistics about the server."""
    requested = _requested_sections([name.decode("utf-8", "replace").lower() for name in names])
    requested -= STATE_SECTIONS if context.server.proxy.info_fields is not None else {PROXY}

    def merge(responses: Sequence[Mapping[str, Any]]) -> Reply:
        return _text(context, requested, ProcessStats.total(map(ProcessStats.from_json, responses)))

    if requested.isdisjoint(COUNTING):
        return _text(context, requested, ProcessStats())
    if context.server.workers is None:
        return _text(context, requested, stats_of_process(context.server))
    return context.server.gather(process_stats, None, merge)


def _text(context: CommandContext, requested: Set[str], total: ProcessStats) -> Reply:
    """Return the text of the requested sections. total: the statistics of all processes."""
    texts = [
        _section_text(title, make(context, total)) for name, (title, make) in SECTIONS.items() if name in requested
    ]
    return Verbatim("\r\n".join(texts).encode())


@worker_query("process stats")
def process_stats(server: ServerContext, nothing: None) -> Mapping[str, Any]:
    """Return this process's statistics."""
    return stats_of_process(server).to_json()


@worker_query("process memory")
def process_memory(server: ServerContext, nothing: None) -> Mapping[str, Any]:
    """Return this process's statistics without those of commands, which are many."""
    return _stats_of(server, Stats()).to_json()


def stats_of_process(server: ServerContext) -> ProcessStats:
    """Return this process's statistics, with its own counters: they go on counting."""
    server.stats.collect()
    return _stats_of(server, server.stats)


def _stats_of(server: ServerContext, stats: Stats) -> ProcessStats:
    sessions, tracking = server.sessions.values(), server.tracking
    watch_counts = [len(session.watched) for session in sessions if session.watched]
    pending_output = [server.clients.output_bytes(session.id) for session in sessions]
    channels, patterns, shard_channels = (len(server.message_bus.pubsub.names(kind)) for kind in SubscriptionKind)
    own = ProcessStats.of_this_process(stats, len(sessions), server.process.memory_at_start)
    return replace(
        own,
        output_bytes=sum(pending_output),
        largest_output_bytes=max(pending_output, default=0),
        paused=sum(session.is_paused for session in sessions),
        watching=len(watch_counts),
        watched_keys=sum(watch_counts),
        tracking=len(tracking.clients),
        tracked_keys=tracking.keys,
        tracked_items=tracking.items,
        tracked_prefixes=tracking.prefixes,
        subscribed=sum(session.subscriptions is not None for session in sessions),
        channels=channels,
        patterns=patterns,
        shard_channels=shard_channels,
    )


def _requested_sections(names: list[str]) -> set[str]:
    requested = set(names)
    if not requested or "default" in requested:
        requested |= DEFAULT
    if requested & {"all", "everything"}:
        requested |= set(SECTIONS)
    return requested


def _section_text(title: str, section: Section) -> str:
    return f"# {title}\r\n" + "".join([f"{name}:{value}\r\n" for name, value in section.items()])


def _server(context: CommandContext, total: ProcessStats) -> Section:
    server = context.server
    uptime_seconds = max(0, context.now_ms - server.process.started_ms) // 1000
    return {
        "redis_version": REDIS_VERSION,
        # After `redis_version`: some clients search the text for a name, and take the first match.
        "sparkis_version": VERSION,
        "redis_git_sha1": "00000000",
        "redis_git_dirty": 0,
        "redis_build_id": 0,
        "redis_mode": "standalone" if server.cluster is None else "cluster",
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "arch_bits": 64 if sys.maxsize > 2**32 else 32,
        "monotonic_clock": "POSIX clock_gettime",
        "multiplexing_api": event_loop.NAME,
        "atomicvar_api": "c11-builtin",
        "gcc_version": "0.0.0",
        "process_id": server.process.process_id,
        "process_supervised": "no",
        "run_id": server.process.run_id,
        "tcp_port": server.process.port,
        "server_time_usec": server.clock() * 1000,
        "uptime_in_seconds": uptime_seconds,
        "uptime_in_days": uptime_seconds // 86_400,
        "hz": 1,
        "configured_hz": 1,
        "lru_clock": context.now_ms // 1000 & LRU_CLOCK_MAX,
        "executable": sys.executable,
        "sparkis_core": CORE,
        "config_file": server.config.config_file or "",
        "io_threads_active": 0,
        **_listeners(server),
    }


def _listeners(server: ServerContext) -> Section:
    hosts = "".join(f",bind={host}" for host in server.config.hosts)
    ports = {
        "tcp": server.process.port if server.process.port != server.process.tls_port else 0,
        "tls": server.process.tls_port,
    }
    listeners = [f"name={name}{hosts},port={port}" for name, port in ports.items() if port]
    return {f"listener{number}": text for number, text in enumerate(listeners)}


def _clients(context: CommandContext, total: ProcessStats) -> Section:
    return {
        "connected_clients": total.clients,
        "cluster_connections": 0,
        "maxclients": context.server.config.maxclients,
        "client_recent_max_input_buffer": 0,
        "client_recent_max_output_buffer": total.largest_output_bytes,
        "blocked_clients": total.paused,
        "tracking_clients": total.tracking,
        "pubsub_clients": total.subscribed,
        "watching_clients": total.watching,
        "clients_in_timeout_table": 0,
        "total_watched_keys": total.watched_keys,
        "total_blocking_keys": 0,
        "total_blocking_keys_on_nokey": 0,
    }


# Fields about parts that only Redis has.
MEMORY_OF_SCRIPTS: Section = {
    "used_memory_lua": 0,
    "used_memory_vm_eval": 0,
    "used_memory_lua_human": "0B",
    "used_memory_scripts_eval": 0,
    "number_of_cached_scripts": 0,
    "number_of_functions": 0,
    "number_of_libraries": 0,
    "used_memory_vm_functions": 0,
    "used_memory_vm_total": 0,
    "used_memory_vm_total_human": "0B",
    "used_memory_functions": 0,
    "used_memory_scripts": 0,
    "used_memory_scripts_human": "0B",
}
MEMORY_LIMIT_AND_FRAGMENTATION: Section = {
    "maxmemory": 0,
    "maxmemory_human": "0B",
    "maxmemory_policy": "noeviction",
    "allocator_frag_ratio": "1.00",
    "allocator_frag_bytes": 0,
    "allocator_rss_ratio": "1.00",
    "allocator_rss_bytes": 0,
    "rss_overhead_ratio": "1.00",
    "rss_overhead_bytes": 0,
    "mem_fragmentation_ratio": "1.00",
    "mem_fragmentation_bytes": 0,
}


def _memory(context: CommandContext, total: ProcessStats) -> Section:
    """Return the real memory of all processes of this server, by Redis' names.

    used: resident bytes; a page of code or of a store counts for each process that maps it. overhead: private memory,
    and pages that were mapped at the start. dataset: the rest, which is pages of the stores; the system frees these
    when memory is short. Fields about parts that only Redis has are 0.
    """
    used, peak, started = total.resident_bytes, total.resident_bytes_peak, total.started_bytes
    overhead = min(used, total.private_bytes)
    machine = _machine_bytes()
    return {
        "used_memory": used,
        "used_memory_human": _human_bytes(used),
        "used_memory_rss": used,
        "used_memory_rss_human": _human_bytes(used),
        "used_memory_peak": peak,
        "used_memory_peak_human": _human_bytes(peak),
        "used_memory_peak_perc": f"{100 * used / (peak or 1):.2f}%",
        "used_memory_overhead": overhead,
        "used_memory_startup": started,
        "used_memory_dataset": used - overhead,
        "used_memory_dataset_perc": f"{100 * (used - overhead) / max(1, used - started):.2f}%",
        "allocator_allocated": used,
        "allocator_active": used,
        "allocator_resident": used,
        "allocator_muzzy": 0,
        "total_system_memory": machine,
        "total_system_memory_human": _human_bytes(machine),
        **MEMORY_OF_SCRIPTS,
        **MEMORY_LIMIT_AND_FRAGMENTATION,
        "mem_not_counted_for_evict": 0,
        "mem_replication_backlog": 0,
        "mem_total_replication_buffers": 0,
        "mem_clients_slaves": 0,
        "mem_clients_normal": total.output_bytes,
        "mem_cluster_links": 0,
        "mem_aof_buffer": 0,
        "mem_allocator": "libc",
        "mem_overhead_db_hashtable_rehashing": 0,
        "active_defrag_running": 0,
        "lazyfree_pending_objects": 0,
        "lazyfreed_objects": 0,
    }


def _machine_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return 0


def _human_bytes(size: float) -> str:
    for unit in "BKMG":
        if size < 1024:
            return f"{size:.0f}B" if unit == "B" else f"{size:.2f}{unit}"
        size /= 1024
    return f"{size:.2f}T"


def _persistence(context: CommandContext, total: ProcessStats) -> Section:
    """Return the fields of a read-only server, which never saves and never forks."""
    loading = {"loading_start_time": context.server.process.started_ms // 1000, "loading_eta_seconds": LOADING_ETA_S}
    return {
        "loading": int(context.server.is_loading),
        "async_loading": 0,
        "current_cow_peak": 0,
        "current_cow_size": 0,
        "current_cow_size_age": 0,
        "current_fork_perc": "0.00",
        "current_save_keys_processed": 0,
        "current_save_keys_total": 0,
        "rdb_changes_since_last_save": 0,
        "rdb_bgsave_in_progress": 0,
        "rdb_last_save_time": last_save_s(context),
        "rdb_last_bgsave_status": "ok",
        "rdb_last_bgsave_time_sec": -1,
        "rdb_current_bgsave_time_sec": -1,
        "rdb_saves": 0,
        "rdb_last_cow_size": 0,
        "rdb_last_load_keys_expired": 0,
        "rdb_last_load_keys_loaded": 0,
        "aof_enabled": 0,
        "aof_rewrite_in_progress": 0,
        "aof_rewrite_scheduled": 0,
        "aof_last_rewrite_time_sec": -1,
        "aof_current_rewrite_time_sec": -1,
        "aof_last_bgrewrite_status": "ok",
        "aof_rewrites": 0,
        "aof_rewrites_consecutive_failures": 0,
        "aof_last_write_status": "ok",
        "aof_last_cow_size": 0,
        "module_fork_in_progress": 0,
        "module_fork_last_cow_size": 0,
        **(loading if context.server.is_loading else {}),
    }


# Fields about parts that only Redis has.
STATS_OF_EVICTION: Section = {
    "expired_stale_perc": "0.00",
    "expired_time_cap_reached_count": 0,
    "expire_cycle_cpu_milliseconds": 0,
    "evicted_keys": 0,
    "evicted_clients": 0,
    "evicted_scripts": 0,
    "total_eviction_exceeded_time": 0,
    "current_eviction_exceeded_time": 0,
}
STATS_OF_FORKS_AND_DEFRAGMENTATION: Section = {
    "latest_fork_usec": 0,
    "total_forks": 0,
    "migrate_cached_sockets": 0,
    "slave_expires_tracked_keys": 0,
    "active_defrag_hits": 0,
    "active_defrag_misses": 0,
    "active_defrag_key_hits": 0,
    "active_defrag_key_misses": 0,
    "total_active_defrag_time": 0,
    "current_active_defrag_time": 0,
}


def _stats(context: CommandContext, total: ProcessStats) -> Section:
    stats, applied = total.stats, _applied(context)
    return {
        "total_connections_received": stats.connections_received,
        "total_commands_processed": stats.calls,
        "instantaneous_ops_per_sec": round(stats.commands_per_second),
        "total_net_input_bytes": stats.input_bytes,
        "total_net_output_bytes": stats.output_bytes,
        "total_net_repl_input_bytes": 0,
        "total_net_repl_output_bytes": 0,
        "instantaneous_input_kbps": f"{stats.input_bytes_per_second / 1024:.2f}",
        "instantaneous_output_kbps": f"{stats.output_bytes_per_second / 1024:.2f}",
        "instantaneous_input_repl_kbps": "0.00",
        "instantaneous_output_repl_kbps": "0.00",
        "rejected_connections": stats.connections_rejected,
        "sync_full": 0,
        "sync_partial_ok": 0,
        "sync_partial_err": 0,
        "expired_subkeys": sum(each.expired_fields for each in applied),
        "expired_keys": sum(each.expired_keys for each in applied),
        **STATS_OF_EVICTION,
        "keyspace_hits": stats.hits,
        "keyspace_misses": stats.misses,
        "pubsub_channels": total.channels,
        "pubsub_patterns": total.patterns,
        "pubsubshard_channels": total.shard_channels,
        **STATS_OF_FORKS_AND_DEFRAGMENTATION,
        "tracking_total_keys": total.tracked_keys,
        "tracking_total_items": total.tracked_items,
        "tracking_total_prefixes": total.tracked_prefixes,
        "unexpected_error_replies": stats.internal_errors,
        "total_error_replies": stats.errors.total(),
        "dump_payload_sanitizations": 0,
        "total_reads_processed": stats.reads,
        "total_writes_processed": stats.writes,
        "io_threaded_reads_processed": 0,
        "io_threaded_writes_processed": 0,
        "client_query_buffer_limit_disconnections": stats.closed_for_input,
        "client_output_buffer_limit_disconnections": stats.closed_for_output,
        "reply_buffer_shrinks": 0,
        "reply_buffer_expands": 0,
        "eventloop_cycles": stats.rounds,
        "eventloop_duration_sum": stats.rounds_ns // 1000,
        "eventloop_duration_cmd_sum": sum(each.nanoseconds for each in stats.commands.values()) // 1000,
        "instantaneous_eventloop_cycles_per_sec": round(stats.rounds_per_second),
        "instantaneous_eventloop_duration_usec": round(stats.round_ns / 1000),
        **{f"acl_access_denied_{name}": stats.denied[reason] for name, reason in DENIED.items()},
    }


def _replication(context: CommandContext, total: ProcessStats) -> Section:
    role: dict[str, object] = {"role": "master"}
    cluster = context.server.cluster
    replicas = [] if cluster is None else [*cluster.topology.replicas(cluster.myself)]
    if context.server.is_replica:
        is_stale = any(job.is_stale for job in context.server.keyspace.jobs.values())
        role = {
            "role": "slave",
            "master_host": "spark" if cluster is None else cluster.master.host,
            "master_port": 0 if cluster is None else cluster.master.port,
            "master_link_status": "down" if is_stale else "up",
            "master_last_io_seconds_ago": -1 if is_stale else 0,
            "master_sync_in_progress": 0,
            "slave_read_repl_offset": 0,
            "slave_repl_offset": 0,
            "slave_priority": 100,
            "slave_read_only": 1,
            "replica_announced": 1,
        }
    return role | {
        "connected_slaves": len(replicas),
        **{
            f"slave{number}": f"ip={each.host},port={each.port},state=online,offset=0,lag=0"
            for number, each in enumerate(replicas)
        },
        "master_failover_state": "no-failover",
        "master_replid": context.server.process.run_id,
        "master_replid2": "0" * 40,
        "master_repl_offset": 0,
        "second_repl_offset": -1,
        "repl_backlog_active": 0,
        "repl_backlog_size": 0,
        "repl_backlog_first_byte_offset": 0,
        "repl_backlog_histlen": 0,
    }


def _cpu(context: CommandContext, total: ProcessStats) -> Section:
    return {
        "used_cpu_sys": f"{total.system_s:.6f}",
        "used_cpu_user": f"{total.user_s:.6f}",
        "used_cpu_sys_children": f"{total.children_system_s:.6f}",
        "used_cpu_user_children": f"{total.children_user_s:.6f}",
        "used_cpu_sys_main_thread": f"{total.thread_system_s:.6f}",
        "used_cpu_user_main_thread": f"{total.thread_user_s:.6f}",
    }


def _commandstats(context: CommandContext, total: ProcessStats) -> Section:
    rows = {}
    for name, command_stats in total.stats.commands.items():
        if not command_stats.is_used:
            continue
        microseconds = command_stats.nanoseconds // 1000
        per_call = microseconds / command_stats.calls if command_stats.calls else 0.0
        rows[f"cmdstat_{name}"] = (
            f"calls={command_stats.calls},usec={microseconds},usec_per_call={per_call:.2f},"
            f"rejected_calls={command_stats.rejected},failed_calls={command_stats.failed}"
        )
    return rows


def _errorstats(context: CommandContext, total: ProcessStats) -> Section:
    return {f"errorstat_{code}": f"count={count}" for code, count in sorted(total.stats.errors.items())}


def _latencystats(context: CommandContext, total: ProcessStats) -> Section:
    """Return percentiles of each command's latency, interpolated within a bucket of `CommandStats.took`."""
    return {
        f"latency_percentiles_usec_{name}": ",".join(
            f"p{percent:g}={command_stats.percentile_ns(percent) / 1000:.3f}" for percent in PERCENTILES
        )
        for name, command_stats in total.stats.commands.items()
        if any(command_stats.took)
    }


def _keyspace(context: CommandContext, total: ProcessStats) -> Section:
    """Return the line of database 0, the only one."""
    jobs = list(context.visibility_of(context.jobs).jobs())
    rows = [_expiry_counts(visible) for visible in jobs]
    keys, expiring, maps = (sum(counts) for counts in zip((0, 0, 0), *rows, strict=True))
    mean_ms = _mean_ttl_ms(
        context, [visible for visible in jobs if visible.is_fully_visible and visible.applied.expiring]
    )
    return {"db0": f"keys={keys},expires={expiring},avg_ttl={mean_ms},subexpiry={maps}"} if keys else {}


def _mean_ttl_ms(context: CommandContext, jobs: Sequence[VisibleJob]) -> int:
    """Return the mean TTL of sampled keys, as Redis does; 0 if no sample has a key with a TTL."""
    total_ms = weights = 0.0
    for visible in jobs[:SAMPLED_JOBS_MAX]:
        ttls = sampled_ttls(context.jobs.snapshot_of(visible.job.name))
        if ttls:
            total_ms += sum(ttls) / len(ttls) * visible.applied.expiring
            weights += visible.applied.expiring
    return round(total_ms / (weights or 1))


def sampled_ttls(snapshot: Snapshot) -> list[int]:
    """Return the TTLs of the expiring keys in a range of the keyspace that begins at a random position.

    Positions are hashes, so a range of them is a random sample of all keys.
    """
    owned = snapshot.owned_slots
    ttls_ms: list[int] = []
    for _ in range(SAMPLE_TRIES if owned else 0):
        cursor, keys = snapshot.scan(owned.random_position(), SAMPLE_KEYS, only_expiring=True)
        if not cursor:
            keys += snapshot.scan(0, SAMPLE_KEYS, only_expiring=True)[1]
        entries = filter(None, map(snapshot.key_info, keys))
        ttls_ms += [entry.expire_at_ms - snapshot.now_ms for entry in entries if entry.expire_at_ms is not None]
        if len(ttls_ms) >= SAMPLE_TTLS:
            break
    return ttls_ms


def _expiry_counts(visible: VisibleJob) -> tuple[int, int, int]:
    """Return the number of keys, expiring keys and expiring maps; the last two are 0 for a partly visible job."""
    if not visible.is_fully_visible:
        return visible.countable_keys, 0, 0
    applied = visible.applied
    return applied.key_count, applied.expiring, applied.expiring_maps


def _applied(context: CommandContext) -> list[AppliedEpoch]:
    """Return the applied epochs of all jobs that the user may fully read."""
    return [visible.applied for visible in context.visibility_of(context.jobs).jobs() if visible.is_fully_visible]


def _sparkis(context: CommandContext, total: ProcessStats) -> Section:
    """Return a line per job: its readable epoch, its committed epoch and the lag between them."""
    visible_jobs = list(context.visibility_of(context.jobs).jobs())
    rows: dict[str, object] = {
        "sparkis_jobs": len(visible_jobs),
        "sparkis_store_bytes": sum(visible.file_bytes[0] for visible in visible_jobs),
        "sparkis_store_free_bytes": sum(visible.file_bytes[1] for visible in visible_jobs),
    }
    for visible in visible_jobs:
        rows[f"job_{visible.job.name}"] = info_text(info_row_of(visible, context.now_ms))
    return rows


def _proxy(context: CommandContext, total: ProcessStats) -> Section:
    """Return a proxy's statistics about its servers. Keys and jobs are in the servers' own INFO."""
    return {} if context.server.proxy.info_fields is None else context.server.proxy.info_fields()


PROXY = "proxy"
STATE_SECTIONS = {"keyspace", "sparkis"}

# In Redis' order. An unknown section name is ignored, as in Redis.
SECTIONS: dict[str, tuple[str, Callable[[CommandContext, ProcessStats], Section]]] = {
    "server": ("Server", _server),
    "clients": ("Clients", _clients),
    "memory": ("Memory", _memory),
    "persistence": ("Persistence", _persistence),
    "stats": ("Stats", _stats),
    "replication": ("Replication", _replication),
    "cpu": ("CPU", _cpu),
    "modules": ("Modules", lambda context, total: {}),
    "commandstats": ("Commandstats", _commandstats),
    "errorstats": ("Errorstats", _errorstats),
    "latencystats": ("Latencystats", _latencystats),
    "cluster": ("Cluster", lambda context, total: {"cluster_enabled": int(context.server.cluster is not None)}),
    "keyspace": ("Keyspace", _keyspace),
    "sparkis": ("Sparkis", _sparkis),
    PROXY: ("Proxy", _proxy),
}
DEFAULT = set(SECTIONS) - {"commandstats", "latencystats"}
# Sections with counters of all processes that serve the port. For the others no process is asked.
COUNTING = {"clients", "memory", "stats", "cpu", "commandstats", "errorstats", "latencystats"}
