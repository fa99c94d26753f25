"""The fields of INFO that redis_exporter reads: those that a real server has, sparkis has, where the exporter looks.

The names are those of the maps in redis_exporter's `exporter.go`, without those of other products, and the lines that
its `info.go` takes apart.
"""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from compat.conformance.servers import Running

GAUGES = re.findall(
    r"\w+",
    """
uptime_in_seconds process_id connected_clients blocked_clients tracking_clients
client_recent_max_output_buffer client_recent_max_input_buffer allocator_active allocator_allocated
allocator_resident allocator_frag_ratio allocator_frag_bytes allocator_rss_ratio allocator_rss_bytes
used_memory used_memory_rss used_memory_peak used_memory_lua used_memory_overhead
used_memory_startup used_memory_dataset used_memory_scripts maxmemory mem_fragmentation_ratio
mem_fragmentation_bytes mem_clients_slaves mem_clients_normal expired_stale_perc
mem_not_counted_for_evict lazyfree_pending_objects active_defrag_running migrate_cached_sockets
active_defrag_hits active_defrag_misses active_defrag_key_hits active_defrag_key_misses
expired_time_cap_reached_count loading rdb_changes_since_last_save rdb_bgsave_in_progress
rdb_last_save_time rdb_last_bgsave_status rdb_last_bgsave_time_sec rdb_current_bgsave_time_sec
rdb_last_cow_size aof_enabled aof_rewrite_in_progress aof_rewrite_scheduled
aof_last_rewrite_time_sec aof_current_rewrite_time_sec aof_last_cow_size aof_last_bgrewrite_status
aof_last_write_status module_fork_in_progress module_fork_last_cow_size pubsub_channels
pubsub_patterns latest_fork_usec connected_slaves repl_backlog_size repl_backlog_active
repl_backlog_first_byte_offset repl_backlog_histlen master_repl_offset second_repl_offset
slave_expires_tracked_keys sync_full sync_partial_ok sync_partial_err total_system_memory
""",
)
COUNTERS = re.findall(
    r"\w+",
    """
total_connections_received total_commands_processed rejected_connections total_net_input_bytes
total_net_output_bytes expired_keys evicted_keys keyspace_hits keyspace_misses used_cpu_sys
used_cpu_user used_cpu_sys_children used_cpu_user_children
""",
)
# Labels of `redis_instance_info`, and what it makes other metrics of.
LABELS = re.findall(
    r"\w+",
    """
role redis_version redis_build_id redis_mode os maxmemory_policy tcp_port run_id process_id
master_replid hz configured_hz
""",
)
# Lines that are taken apart, by section.
LINES = {
    "Commandstats": r"cmdstat_[^:]+:calls=\d+,usec=\d+,usec_per_call=[\d.]+,rejected_calls=\d+,failed_calls=\d+",
    "Latencystats": r"latency_percentiles_usec_[^:]+:p50=[\d.]+,p99=[\d.]+,p99.9=[\d.]+",
    "Errorstats": r"errorstat_\w+:count=\d+",
    "Keyspace": r"db\d+:keys=\d+,expires=\d+,avg_ttl=\d+(,subexpiry=\d+)?",
}


def info_of(server: Running) -> dict[str, dict[str, str]]:
    """Return what `INFO ALL` has: the fields of each section."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    section = ""
    with server.connect() as client:
        client.call("GET", "nobody's")
        client.call("NOSUCHCOMMAND")
        text = client.call("INFO", "ALL").plain.decode()
    for line in text.splitlines():
        if line.startswith("# "):
            section = line[2:]
        elif ":" in line:
            name, _, value = line.partition(":")
            found[section][name] = value
    return found


def number(value: str) -> float | None:
    """Return what the exporter makes of a value; None if it can make nothing of it."""
    words = {"ok": 1.0, "true": 1.0, "err": 0.0, "fail": 0.0, "false": 0.0}
    try:
        return words[value] if value in words else float(value)
    except ValueError:
        return None


@pytest.mark.parametrize("name", GAUGES + COUNTERS + LABELS)
def test_exporter_field_is_in_same_section_as_in_redis(
    name: str, infos: tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]]
) -> None:
    real, ours = infos
    sections = [section for section, fields in real.items() if name in fields]
    assert sections, f"redis-server has no field {name}"
    for section in sections:
        assert name in ours[section]
        if name not in LABELS:
            assert number(ours[section][name]) is not None


@pytest.mark.parametrize(("section", "pattern"), LINES.items())
def test_line_can_be_taken_apart(
    section: str, pattern: str, infos: tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]]
) -> None:
    for info in infos:
        lines = [f"{name}:{value}" for name, value in info[section].items()]
        assert lines and [line for line in lines if not re.fullmatch(pattern, line)] == []


@pytest.fixture(scope="module")
def infos(redis_primary: Running, sparkis: Running) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]]:
    """What a real server and sparkis report."""
    return info_of(redis_primary), info_of(sparkis)
