"""The types of `hop.pyx`, which has the docstrings."""

from collections.abc import Callable, Sequence
from typing import Protocol

from resp_server.execution.context import ServerContext
from resp_server.metrics.stats import CommandStats
from resp_server.native.core import InputInterceptor
from resp_server.proxy.connection import ProxyConnection
from resp_server.proxy.raw_replies import RawReply, RawReplySender
from resp_server.proxy.requests import UpstreamRequest
from resp_server.proxy.upstream_cluster import UpstreamCluster
from resp_server.session.epoch_feed import Epochs, ReplyEpochs

class HopSink(Protocol):
    """Whoever asked: a client's connection. Taking an answer does not raise: others' come behind."""

    @property
    def seen(self) -> Epochs:
        """What it has seen: nothing before that will do."""

    def answered(self, reply: bytes | RawReplySender, epochs: ReplyEpochs) -> None:
        """Take what was waited for, and what it is from."""

    def ask_again(self, data: bytes, epochs: ReplyEpochs) -> None:
        """Send it again, the general way: replies are from earlier epochs than others before them."""

    def fail(self, index: int, error: Exception) -> None:
        """Take what was raised instead."""

class PipelineBatch:
    deadline_s: float
    remaining: int
    has_partial: bool
    def take(self, replies: Sequence[bytes], epochs: ReplyEpochs) -> None: ...
    def fail_all(self, error: Exception) -> None: ...
    def next_request(self) -> UpstreamRequest: ...
    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = ()) -> None: ...
    def fail(self, index: int, error: Exception) -> None: ...
    def seen_epochs(self, index: int) -> Epochs: ...
    def close(self) -> bytes: ...
    def feed(self, data: bytes, start: int, epochs: ReplyEpochs) -> int: ...

class Hop:
    has_partial: bool
    last_command: str
    def __init__(
        self, cluster: UpstreamCluster, server: ServerContext, commands: Sequence[tuple[str, int, int, CommandStats]]
    ) -> None: ...
    def ask(self, sink: HopSink, data: bytes, protocol: int) -> int: ...
    def collect(self) -> None: ...

class Asker(InputInterceptor):
    seen: Epochs
    def __init__(
        self,
        hop: Hop,
        connection: ProxyConnection,
        write: Callable[[bytes], None],
    ) -> None: ...
    def left_of(self, data: bytes) -> bytes: ...
    def ask(self, data: bytes) -> bool: ...
    def keeps_begun(self, data: bytes) -> bool: ...
    def answered(self, reply: bytes, epochs: ReplyEpochs) -> None: ...
    def ask_again(self, data: bytes, epochs: ReplyEpochs) -> None: ...
    def fail(self, index: int, error: Exception) -> None: ...
