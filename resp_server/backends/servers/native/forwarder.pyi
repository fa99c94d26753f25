"""The types of `forwarder.pyx`, which has the docstrings."""

from collections.abc import Callable, Mapping, Sequence

from resp_server.backends.redis.cluster import NodeConnections
from resp_server.backends.redis.connection import UpstreamConnection
from resp_server.backends.routing.key_matcher import KeyOwner
from resp_server.backends.routing.result_cache import ResultCache
from resp_server.backends.servers.command_routes import StateForwardSpec
from resp_server.backends.servers.native.client_batch import ForwarderSink
from resp_server.backends.servers.native.stored_reads import StoredReads
from resp_server.backends.servers.server_stores import ServerStores
from resp_server.backends.servers.state_cluster import StateCluster
from resp_server.command.keys import KeyRange
from resp_server.command.policy import SpecialCommand
from resp_server.metrics.stats import CommandStats
from resp_server.pipeline.context import ServerContext
from resp_server.session.tracking import TrackingState

class Forwarder:
    has_partial: bool
    last_command: str
    def __init__(self, cluster: StateCluster, server: ServerContext, commands: Sequence[StateForwardSpec]) -> None: ...
    def forward(
        self,
        sink: ForwarderSink,
        data: bytes,
        protocol: int,
        database: int = 0,
        is_of_states: bool = False,
        tracking_state: TrackingState | None = None,
    ) -> int: ...
    def hold(self, all_requests: bool, publishing: bool) -> None: ...
    def set_upstream(
        self,
        upstream: Callable[[int, int, int], UpstreamConnection | NodeConnections | None],
        dedicated_clients: Sequence[Mapping[int, object]],
        cache_of: Callable[[int, int], ResultCache | None],
        commands: Sequence[tuple[str, bool, bool, Sequence[KeyRange], SpecialCommand | None, bool, int, CommandStats]],
    ) -> None: ...
    def set_key_owners(
        self, by_database: Mapping[int, Sequence[KeyOwner]], others: Sequence[KeyOwner] = ()
    ) -> None: ...
    def use_stores(self, reads: StoredReads, stores: ServerStores | None) -> None: ...
    def collect(self) -> None: ...
