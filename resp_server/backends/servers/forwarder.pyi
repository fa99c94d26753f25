"""The types of `forwarder.pyx`, which has the docstrings."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from resp_server.backends.redis.cluster import NodeConnections
from resp_server.backends.redis.connection import UpstreamConnection, UpstreamRequest
from resp_server.backends.routing.key_matcher import ForwardedKeys
from resp_server.backends.routing.result_cache import ResultCache
from resp_server.backends.servers.command_routes import ForwardedCommand
from resp_server.backends.servers.requests import ServerRequest
from resp_server.backends.servers.server_stores import ServerStores
from resp_server.backends.servers.state_cluster import StateCluster
from resp_server.command.keys import KeyRange
from resp_server.command.policy import Role
from resp_server.forwarding.raw_replies import RawReply, RawReplySender
from resp_server.metrics.stats import CommandStats
from resp_server.native.client_fields import InputInterceptor
from resp_server.native.fast_path import FastPath
from resp_server.pipeline.context import ServerContext
from resp_server.session.epoch_feed import Epochs, ReplyEpochs
from resp_server.session.session import Session
from resp_server.session.tracking import TrackingState

class ForwarderConnection(Protocol):
    """A client's connection (`backends.servers.proxy_connection.ProxyConnection`)."""

    session: Session
    is_idle: bool

    def send_stream(self, reply: RawReplySender) -> None: ...
    def continue_after_reply(self) -> None: ...
    def resend(self, data: bytes, epochs: ReplyEpochs) -> None: ...
    def error_reply(self, error: Exception) -> bytes: ...
    def close(self) -> None: ...
    def close_on_error(self, error: Exception) -> None: ...

class ForwarderSink(Protocol):
    """The client of a batch of requests. Its methods do not raise: replies of other clients come next."""

    @property
    def seen(self) -> Epochs:
        """The epochs that the client has seen; its replies must not be from earlier ones."""

    @property
    def watches_states(self) -> bool:
        """Whether the client watches states' keys, so that EXEC takes the general path."""

    def deliver(self, reply: bytes | RawReplySender, epochs: ReplyEpochs) -> None:
        """Take the replies to all requests, in order, and their epochs."""

    def resend(self, data: bytes, epochs: ReplyEpochs) -> None:
        """Have the general path resend the requests: a reply was from an earlier epoch than the reply before it."""

    def fail(self, error: Exception) -> None:
        """Take an exception in place of the replies."""

class UpstreamForwarderSink(ForwarderSink, Protocol):
    """The client of a batch with requests for the upstream."""

    @property
    def client_id(self) -> int:
        """The id of the client."""

    def error_reply(self, error: Exception) -> bytes:
        """Return the error reply for an exception."""

    def end(self, replies: bytes | RawReplySender) -> None:
        """Take the last replies, and close the client's connection: a request to the upstream may have run, or not."""

class PipelineBatch:
    deadline_s: float
    sent_s: float
    remaining: int
    has_partial: bool
    is_batch: bool
    is_blocking: bool
    def take(self, replies: Sequence[bytes], epochs: ReplyEpochs) -> None: ...
    def fail_all(self, error: Exception) -> None: ...
    def next_request(self) -> ServerRequest | UpstreamRequest: ...
    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = ()) -> None: ...
    def fail(self, index: int, error: Exception) -> None: ...
    def seen_epochs(self, index: int) -> Epochs: ...
    def close(self) -> bytes: ...
    def feed(self, data: bytes, start: int, epochs: ReplyEpochs) -> int: ...

class Forwarder:
    has_partial: bool
    holds_upstream: bool
    holds_publishing: bool
    last_command: str
    def __init__(self, cluster: StateCluster, server: ServerContext, commands: Sequence[ForwardedCommand]) -> None: ...
    def forward(
        self,
        sink: ForwarderSink,
        data: bytes,
        protocol: int,
        database: int = 0,
        is_of_states: bool = False,
        tracking_state: TrackingState | None = None,
    ) -> int: ...
    def set_upstream(
        self,
        upstream: Callable[[int, int, int], UpstreamConnection | NodeConnections | None],
        own_clients: Sequence[Mapping[int, object]],
        cache_of: Callable[[int, int], ResultCache | None],
        commands: Sequence[tuple[str, bool, bool, Sequence[KeyRange], Role | None, bool, int, CommandStats]],
    ) -> None: ...
    def set_patterns(
        self, by_database: Mapping[int, Sequence[ForwardedKeys]], others: Sequence[ForwardedKeys] = ()
    ) -> None: ...
    def collect(self) -> None: ...

class StoredReads(FastPath):
    def use(self, forwarder: Forwarder, stores: ServerStores | None) -> None: ...

class ClientForwarder(InputInterceptor):
    seen: Epochs
    client_id: int
    watches_states: bool
    def __init__(
        self, forwarder: Forwarder, connection: ForwarderConnection, write: Callable[[bytes], None]
    ) -> None: ...
    def forward_input(self, data: bytes) -> bytes: ...
    def forward(self, data: bytes) -> bytes: ...
    def deliver_complete(self) -> bool: ...
    def store_partial(self, data: bytes) -> bool: ...
    def deliver(self, reply: bytes | RawReplySender, epochs: ReplyEpochs) -> None: ...
    def resend(self, data: bytes, epochs: ReplyEpochs) -> None: ...
    def fail(self, error: Exception) -> None: ...
    def error_reply(self, error: Exception) -> bytes: ...
    def end(self, replies: bytes | RawReplySender) -> None: ...
