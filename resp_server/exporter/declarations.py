"""The declarations of all metrics: name, kind, meaning, labels with their bounds. docs/metrics.md is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum

# The value of a label that stands for all values beyond the label's bound.
OTHER = "other"


class Kind(StrEnum):
    """The kinds of metrics, in the words of OpenMetrics."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Merge(Enum):
    """The way to join two values with the same labels: of several servers behind a proxy, or of `other`."""

    SUM = "sum"
    LARGEST = "largest"
    SMALLEST = "smallest"


@dataclass(frozen=True)
class Label:
    """A label.

    Args:
        values_max: The number of values; `within` another label, for each of that label's values.
    """

    name: str
    values_max: int
    meaning: str
    within: str = ""


LABELS: Mapping[str, Label] = {
    label.name: label
    for label in (
        Label("version", 1, "the version of sparkis"),
        Label("core", 1, "`compiled` or `python`"),
        Label("group", 32, "the group of commands, as in `COMMAND DOCS`: `string`, `hash`, `connection`, ..."),
        Label("error", 64, "the first word of an error reply: `ERR`, `WRONGTYPE`, `LOADING`, ..."),
        Label("reason", 8, "a reason that the metric's meaning lists"),
        Label("mode", 2, "`user` or `system`"),
        Label("job_name", 200, "a job; `job` is Prometheus' own label of the target"),
        Label("state", 50, "a state of the job", within="job_name"),
        Label("topic", 100, "a topic of a Kafka source", within="job_name"),
        Label("partition", 100, "its partition; `all` if the job reads more than 100 partitions", within="topic"),
        Label("server", 128, "the address of a state server, as the topology has it"),
        Label("rule", 64, "a shadow rule of the rules file"),
        Label("outcome", 16, "an outcome of a comparison, as in `STATE SHADOW`", within="rule"),
        Label("condition", 4, "`connected`, `silent`, `draining` or `away`"),
    )
}

# What has a metric: the column "of" in docs/metrics.md.
SERVE, STATE_SERVER, PROXY, UPSTREAM, REGISTRY = "serve", "state-server", "proxy", "--upstream", "registry"
SERVERS = (SERVE, STATE_SERVER)
CLIENTS = (*SERVERS, PROXY)
ALL = (*CLIENTS, REGISTRY)


@dataclass(frozen=True)
class Metric:
    """A metric.

    Args:
        name: As in queries, so a counter's ends in `_total`.
        of: The programs that have it.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    of: tuple[str, ...] = CLIENTS
    merge: Merge = Merge.SUM

    @property
    def family(self) -> str:
        """The name of the metric's family in OpenMetrics."""
        return self.name.removesuffix("_total") if self.kind is Kind.COUNTER else self.name


def _counter(name: str, meaning: str, *labels: str, of: tuple[str, ...] = CLIENTS) -> Metric:
    return Metric(f"sparkis_{name}_total", Kind.COUNTER, meaning, labels, of)


def _gauge(name: str, meaning: str, *labels: str, of: tuple[str, ...] = CLIENTS, merge: Merge = Merge.SUM) -> Metric:
    return Metric(f"sparkis_{name}", Kind.GAUGE, meaning, labels, of, merge)


PROCESS = (
    _gauge("build_info", "1, with the version", "version", "core", of=ALL),
    _gauge("start_time_seconds", "When the server started, in seconds since 1970", of=ALL),
    _gauge("ready", "1 if /readyz says so, else 0", of=ALL),
    _gauge("resident_memory_bytes", "Resident memory of all processes; a shared page counts in each", of=ALL),
    _gauge("private_memory_bytes", "The part of it that is not pages of stores", of=ALL),
    _counter("cpu_seconds", "Processor time of all processes", "mode", of=ALL),
)

CLIENT_METRICS = (
    _gauge("connected_clients", "Clients that are connected"),
    _gauge("clients_max", "The limit of connected clients (--maxclients)"),
    _counter("connections_received", "Connections of clients that were accepted or rejected"),
    _counter("connections_rejected", "Connections of clients that were rejected"),
    _counter(
        "clients_closed", "Clients that were cut because of a full buffer: `input`, or `output` (unread)", "reason"
    ),
    _counter("received_bytes", "Bytes from clients"),
    _counter("sent_bytes", "Bytes to clients"),
    _gauge("unsent_bytes", "Replies and pushes that clients have not read"),
    _gauge("tracking_clients", "Clients with CLIENT TRACKING"),
    _gauge("tracked_keys", "Keys that clients track; a key that several processes track counts in each"),
    _gauge("subscribed_clients", "Clients with a subscription of pub/sub"),
    Metric(
        "sparkis_command_duration_seconds",
        Kind.HISTOGRAM,
        "Executed requests by processor time. Requests that are executed together count with their mean",
        ("group",),
    ),
    _counter("commands_failed", "Executed requests with an error reply", "group"),
    _counter("commands_rejected", "Requests that were not executed: NOAUTH, READONLY and the like", "group"),
    _counter("errors", "Error replies", "error"),
    _counter("internal_errors", "Unexpected exceptions; each is in the log under an id"),
    _counter("access_denied", "Denials, as in ACL LOG: `auth`, `command`, `key` or `channel`", "reason"),
    _counter("keyspace_hits", "Look-ups of keys that exist"),
    _counter("keyspace_misses", "Look-ups of keys that do not exist"),
    _counter("event_loop_rounds", "Rounds of the event loop that read or wrote sockets"),
    _counter("event_loop_seconds", "The time of these rounds"),
)

JOBS = (
    _gauge("jobs", "Jobs that are served"),
    _gauge("jobs_unreadable", "Jobs that are being opened, or cannot be", of=SERVERS),
    _gauge("job_epoch", "The epoch that clients read", "job_name", merge=Merge.SMALLEST),
    _gauge("job_committed_epoch", "The last committed epoch that the server knows", "job_name", merge=Merge.LARGEST),
    _gauge("job_lag_epochs", "Committed epochs that clients do not read yet", "job_name", merge=Merge.LARGEST),
    _gauge(
        "job_lag_seconds",
        "How much older the epoch that clients read is than the committed one",
        "job_name",
        merge=Merge.LARGEST,
    ),
    _gauge(
        "job_age_seconds", "The time since the epoch that clients read was committed", "job_name", merge=Merge.LARGEST
    ),
    _gauge(
        "job_stale",
        "1 if nobody writes the job: its query is stopped, or cannot be reached",
        "job_name",
        merge=Merge.LARGEST,
    ),
    _gauge(
        "job_incomplete",
        "1 if keys may be missing, because the log began after the query",
        "job_name",
        merge=Merge.LARGEST,
    ),
    _gauge(
        "job_skipped_rows",
        "Rows that were left out since the query's first epoch, because they cannot be written",
        "job_name",
        merge=Merge.LARGEST,
    ),
    _gauge(
        "source_lag_records",
        "Offsets of a Kafka source that the epoch that clients read does not have; missing while it is unknown",
        "job_name",
        "topic",
        "partition",
        merge=Merge.LARGEST,
    ),
    _gauge(
        "source_lag_age_seconds",
        "How long ago the query asked the source for its newest offsets",
        "job_name",
        merge=Merge.LARGEST,
    ),
    Metric(
        "sparkis_record_delay_seconds",
        Kind.HISTOGRAM,
        "The time from a record, by the column `record_time=` of its sink, until clients can read it",
        ("job_name",),
        of=SERVERS,
    ),
    _gauge("job_fresh_keys", "Keys with a value that is not committed yet", "job_name"),
    _gauge(
        "job_fresh_age_seconds",
        "How long ago the oldest batch that is not committed yet sent its first row; missing without one",
        "job_name",
        merge=Merge.LARGEST,
    ),
    _gauge(
        "job_fresh_incomplete",
        "1 if a batch that is not committed yet lacks rows: clients read committed values of their keys",
        "job_name",
        merge=Merge.LARGEST,
    ),
    _gauge("job_held_back", "1 if state of a new checkpoint is held back", "job_name", merge=Merge.LARGEST),
    _gauge("job_failing", "1 if epochs cannot be applied; the log says why", "job_name", merge=Merge.LARGEST),
    _gauge(
        "job_epochs_per_minute", "Epochs that the job committed in the last minute", "job_name", merge=Merge.LARGEST
    ),
    _gauge("job_changes_per_minute", "Changes in these epochs", "job_name", merge=Merge.LARGEST),
    _counter("job_applied_epochs", "Epochs that this server applied", "job_name", of=SERVERS),
    _counter("job_apply_seconds", "The time in which it applied them", "job_name", of=SERVERS),
    _counter("job_expired_keys", "Keys that expired, since the store was made", "job_name", of=SERVERS),
    _gauge("job_keys", "Keys of the job", "job_name"),
    _gauge("job_store_bytes", "Used space of the job's store on disk", "job_name"),
    _gauge("job_store_free_bytes", "Free space within the store's file", "job_name", of=SERVERS),
    _gauge("state_keys", "Keys of the state", "job_name", "state"),
    _gauge(
        "state_bytes",
        "Bytes of its keys and values in all slots, in the newest snapshot; missing before the first one",
        "job_name",
        "state",
        merge=Merge.LARGEST,
    ),
)

# With `progress=True`; see docs/states.md.
QUERIES = (
    _gauge("query_batch", "The last micro-batch that ended", "job_name", of=SERVERS, merge=Merge.LARGEST),
    _gauge("query_batch_duration_seconds", "Its duration", "job_name", of=SERVERS, merge=Merge.LARGEST),
    _gauge("query_input_rows", "Its rows", "job_name", of=SERVERS),
    _gauge("query_input_rows_per_second", "The rate at which rows arrive", "job_name", of=SERVERS),
    _gauge("query_processed_rows_per_second", "The rate at which the query processes them", "job_name", of=SERVERS),
    _gauge("query_state_rows", "Rows in Spark's state store", "job_name", of=SERVERS),
    _gauge("query_state_memory_bytes", "Memory of Spark's state store", "job_name", of=SERVERS),
)

CLUSTER = (
    _gauge("slots", "Slots that this server answers, of 16384", of=SERVERS),
    _gauge("slots_loading", "Slots that it has to load, and cannot answer yet", of=(STATE_SERVER,)),
    _gauge(
        "topology_version",
        "The version of the topology; -1: none yet",
        of=(STATE_SERVER, PROXY, REGISTRY),
        merge=Merge.SMALLEST,
    ),
)

PROXIES = (
    _gauge("proxy_server_up", "1 if the proxy can talk to the server", "server", of=(PROXY,), merge=Merge.SMALLEST),
    _gauge("proxy_server_slots", "Slots that the server answers for this proxy", "server", of=(PROXY,)),
    _gauge("proxy_server_connections", "Connections to the server", "server", of=(PROXY,)),
    _gauge("proxy_server_requests_waiting", "Requests that wait for its replies", "server", of=(PROXY,)),
    _gauge("proxy_slots_unserved", "Slots without a server", of=(PROXY,)),
    _counter("proxy_moves", "Topologies in which slots have another server", of=(PROXY,)),
    _counter("proxy_server_losses", "Lost connections to servers", of=(PROXY,)),
)

UPSTREAMS = (
    _gauge("upstream_up", "1 if the upstream answers", of=(UPSTREAM,)),
    _gauge("upstream_connections", "Connections to the upstream", of=(UPSTREAM,)),
    _gauge("upstream_requests_waiting", "Requests that wait for its replies", of=(UPSTREAM,)),
    _gauge("upstream_pinned_connections", "Connections that one client has alone", of=(UPSTREAM,)),
    _gauge("upstream_blocked_clients", "Clients in a blocking command", of=(UPSTREAM,)),
    _counter("upstream_losses", "Lost connections to the upstream", of=(UPSTREAM,)),
    _counter("upstream_outages", "How often it stopped answering", of=(UPSTREAM,)),
    _gauge("ownership_known", "1 if the proxy knows which keys belong to states", of=(UPSTREAM,)),
    _gauge("owned_key_formats", "Key formats that belong to states", of=(UPSTREAM,)),
    _counter("dropped_writes", "Writes to keys of states that were answered and dropped, by a rule", of=(UPSTREAM,)),
    _counter("copied_writes", "Writes of a copier that was found to write keys of states", of=(UPSTREAM,)),
    _counter("cache_hits", "Reads that the cache of upstream results answered", of=(UPSTREAM,)),
    _counter("cache_misses", "Cacheable reads that the upstream answered", of=(UPSTREAM,)),
    _counter("cache_evicted", "Cached replies that were removed for others", of=(UPSTREAM,)),
    _counter("cache_invalidated", "Cached replies that a change of their key removed", of=(UPSTREAM,)),
    _gauge("cache_entries", "Cached replies", of=(UPSTREAM,)),
    _gauge("cache_bytes", "Memory of cached replies", of=(UPSTREAM,)),
    _counter("shadow_compared", "Reads that were compared with the states", "rule", of=(UPSTREAM,)),
    _counter("shadow_outcomes", "Their outcomes", "rule", "outcome", of=(UPSTREAM,)),
    _counter("shadow_skipped", "Reads of the rule that were not compared", "rule", of=(UPSTREAM,)),
    _counter("shadow_failed", "Comparisons with an error reply of a backend", "rule", of=(UPSTREAM,)),
)

REGISTRIES = (
    _gauge("registry_leader", "1 if this registry assigns slots, 0 if it stands by", of=(REGISTRY,)),
    _gauge("registry_term", "The term of the registry", of=(REGISTRY,)),
    _gauge("registry_servers", "State servers", "condition", of=(REGISTRY,)),
    _gauge("registry_slots_unowned", "Slots without a server", of=(REGISTRY,)),
    _gauge("registry_slots_moving", "Slots that a server is to get, and has not loaded yet", of=(REGISTRY,)),
    _gauge("registry_server_slots", "Slots of the server", "server", of=(REGISTRY,)),
    _counter("registry_moved_slots", "Slots that got another server", of=(REGISTRY,)),
    _counter("registry_failovers", "Servers whose slots went to others because they were lost", of=(REGISTRY,)),
)

SECTIONS: Mapping[str, tuple[Metric, ...]] = {
    "Processes": PROCESS,
    "Clients and requests": CLIENT_METRICS,
    "Jobs and states": JOBS,
    "Queries": QUERIES,
    "Slots": CLUSTER,
    "Proxies": PROXIES,
    "Upstreams": UPSTREAMS,
    "Registries": REGISTRIES,
}
METRICS: Mapping[str, Metric] = {metric.name: metric for section in SECTIONS.values() for metric in section}
