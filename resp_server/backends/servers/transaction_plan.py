"""Plans an EXEC: which queued commands are sent to which server. Each server gets a transaction of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, cast

from resp_server.backends.retries import SENDS_MAX, is_passing
from resp_server.backends.servers.request_split import split_in_steps
from resp_server.backends.servers.requests import ConnectionKey, ServerRequest, read_point
from resp_server.backends.servers.server_connection import ServerConnection
from resp_server.backends.servers.state_cluster import StateCluster
from resp_server.backends.servers.state_clusters import StateClusters
from resp_server.backends.stores.stores_backend import StoresBackend
from resp_server.command.policy import AnsweredBy, SpecialCommand
from resp_server.command.table import Command
from resp_server.commands.sort import check_request
from resp_server.pipeline.exec_runner import NOTHING_RUN
from resp_server.protocol.errors import ClusterDownError, GenericError, ReplyError
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.answers import ReplyFuture
from resp_server.raw_replies.raw_reply import RawReply, Steps, as_bytes, is_error, split_header
from resp_server.raw_replies.reply_sinks import ReplySink
from resp_server.raw_replies.reply_splitter import PING, items_of, pack
from resp_server.session.epochs import NO_EPOCHS, JobEpoch, ReplyEpochs
from resp_server.session.session import Session
from resp_server.session.transaction import WatchedVersion

# Transactions with more commands use connections for slow requests (guess: they take a server a few milliseconds).
SHORT_COMMANDS_MAX = 512
# Commands for one server; a command with keys of several slots counts once for each (guess: leaves room for others).
COMMANDS_MAX = 90_000
# Items of EXEC's reply that are checked in one step (guess: 0.1 ms).
CHECKED_AT_ONCE = 512

PACKED_MULTI, PACKED_EXEC = pack((b"MULTI",)), pack((b"EXEC",))

# The places of a queued command's replies: for each part, the number of a server's transaction and the position in it.
# None: this proxy replies. Tuples of numbers are cheap, because Python's garbage collector does not visit them.
ReplyPlaces = tuple[tuple[int, int], ...] | None


class QueuedCommands(Protocol):
    """Finds queued commands and the owners of their keys.

    Attributes:
        local: Runs the commands that the proxy itself answers.
    """

    local: StoresBackend

    def command(self, request: Request) -> Command:
        """Return the command of a queued request."""

    def target_of(self, key: bytes) -> tuple[int, int]:
        """Return the index of a key's cluster, and the key's slot."""

    def has_keys(self, session: Session) -> bool:
        """Return whether the session's requests with keys are forwarded to servers."""


@dataclass(eq=False)
class ServerTransaction(ReplySink):
    """A transaction at one server: MULTI, the queued commands for it, EXEC. It is sent once.

    Args:
        number: Its position among the transactions of an EXEC.
        watched: The watched keys at this server.
        complete: Gets the reply to EXEC, the last one.
    """

    number: int
    cluster_index: int
    cluster: StateCluster
    address: str
    packed: list[bytes] = field(default_factory=list)
    watched: dict[bytes, WatchedVersion] = field(default_factory=dict)
    replies: list[RawReply] = field(default_factory=list)
    complete: ReplyFuture = field(default_factory=ReplyFuture)
    items: Sequence[RawReply] = ()
    remaining: int = 0
    deadline_s: float = 0.0
    protocol: int = 2
    is_batch: ClassVar[bool] = False

    def add(self, request: Request) -> int:
        """Add a command; return its position in the transaction."""
        self.packed.append(pack(request))
        return len(self.packed) - 1

    def send(self, epochs: dict[str, JobEpoch], clock_ms: int, protocol: int) -> bool:
        """Send the transaction; return False if no connection to the server is ready yet."""
        is_long = len(self.packed) > SHORT_COMMANDS_MAX
        connection = self._connection(protocol)
        if len(self.packed) > COMMANDS_MAX:
            raise GenericError(f"a transaction may have {COMMANDS_MAX} commands for one server; split it")
        words = [read_point(epochs, clock_ms), PACKED_MULTI, *self.packed, PACKED_EXEC]
        if self.watched:
            pairs = [each for key, mark in self.watched.items() for each in (key, mark.text)]
            words.insert(0, pack((b"STATE", b"EXPECT", *pairs)))
        if not connection.is_ready or not connection.has_room(len(words)):
            connection.connect()
            return False
        self.remaining = len(words)
        self.deadline_s, self.protocol = self.cluster.deadline_s(is_long), protocol
        connection.send(b"".join(words), self)
        return True

    def _connection(self, protocol: int) -> ServerConnection:
        is_long = len(self.packed) > SHORT_COMMANDS_MAX
        return self.cluster.connection(ConnectionKey(self.address, protocol, is_long))

    def is_given_up(self, protocol: int) -> bool:
        """Return whether the server takes no requests for now."""
        return self.cluster.reason_to_give_up(self._connection(protocol)) is not None

    def take(self, replies: Sequence[RawReply], epochs: ReplyEpochs) -> None:
        """Add the next replies."""
        self.remaining -= len(replies)
        self.replies += replies
        self._check_complete()

    def fail_all(self, error: Exception) -> None:
        """Fail the whole transaction."""
        self.complete.fail(0, error)

    def fail(self, index: int, error: Exception) -> None:
        self.complete.fail(0, error)

    def next_request(self) -> ServerRequest:
        """Return a PING in place of the next request, whose reply is an error or was lost.

        The request itself must not be sent again without the rest of the transaction.
        """
        self.remaining -= 1
        request = ServerRequest(PING, 0, self.protocol, self.deadline_s, self, 0, self.address)
        request.sends = SENDS_MAX
        return request

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        """Add the reply to a request that `next_request` returned."""
        self.replies.append(reply)
        self._check_complete()

    def _check_complete(self) -> None:
        if not self.remaining and len(self.replies) == len(self.packed) + 3 + bool(self.watched):
            try:
                self.complete.put(0, self.replies[-1])
            except Exception as error:
                self.complete.fail(0, error)

    @property
    def head(self) -> bytes:
        """The first line of EXEC's reply."""
        return split_header(self.replies[-1])[0]

    @property
    def is_aborted(self) -> bool:
        """Whether EXEC ran nothing because a watched key changed."""
        return self.head + b"\r\n" in NOTHING_RUN.values()

    def read(self) -> Steps[bytes | None]:
        """Split EXEC's reply into items; return the error that fails the whole transaction, or None.

        An error among the items fails the transaction only if a slot has moved or is not ready. Other errors are sent
        to the client as replies.
        """
        found = next(filter(is_error, self.replies), None)
        if found is not None or self.is_aborted:
            return None if found is None else as_bytes(found)
        if self.head[:1] != b"*":
            return b"-%b\r\n" % GenericError("the server did not run the transaction").line
        self.items = yield from items_of(self.replies[-1])
        for index in range(0, len(self.items), CHECKED_AT_ONCE):
            yield
            for error in map(as_bytes, filter(is_error, self.items[index : index + CHECKED_AT_ONCE])):
                if error.startswith(b"-MOVED ") or is_passing(error):
                    return error
        return None


@dataclass
class TransactionPlan:
    """The transactions of one EXEC, by (index of the cluster, server address), in sending order.

    Args:
        errors: The error replies that the proxy makes, by the number of the queued command.
    """

    transactions: dict[tuple[int, str], ServerTransaction] = field(default_factory=dict)
    places: list[ReplyPlaces] = field(default_factory=list)
    errors: dict[int, ReplyError] = field(default_factory=dict)


class TransactionPlanner:
    """Splits queued commands by the current owners of their slots."""

    def __init__(self, commands: QueuedCommands, clusters: StateClusters) -> None:
        self._commands, self._clusters = commands, clusters

    def plan(
        self, session: Session, requests: Sequence[Request], watched: Mapping[tuple[int, bytes], WatchedVersion]
    ) -> Steps[TransactionPlan]:
        """Return the plan; ReplyError if a slot has no owner."""
        plan = TransactionPlan()
        for request in requests:
            plan.places.append((yield from self._add(plan, session, request)))
            yield
        for (db, key), mark in watched.items():
            if db == 0:  # the other databases are empty
                self._transaction_at(plan, *self._commands.target_of(key)).watched[key] = WatchedVersion(*mark)
                yield
        return plan

    def _add(self, plan: TransactionPlan, session: Session, request: Request) -> Steps[ReplyPlaces]:
        command = self._commands.command(request)
        if command.answered_without_upstream is not AnsweredBy.STATES or not self._commands.has_keys(session):
            return None
        at = command.single_key_at
        if 0 < at < len(request):
            transaction = self._transaction_at(plan, *self._commands.target_of(request[at]))
            return ((transaction.number, transaction.add(request)),)
        found = yield from split_in_steps(command, request, self._commands.target_of)
        if found is None:
            return None
        if command.policy.special is SpecialCommand.SORT_RO:
            try:
                check_request(session.user, request)
            except ReplyError as error:
                plan.errors[len(plan.places)] = error
                return None
        places = []
        for part in found[0]:
            transaction = self._transaction_at(plan, *cast("tuple[int, int]", part.target))
            places.append((transaction.number, transaction.add(part.request)))
            yield
        return tuple(places)

    def _transaction_at(self, plan: TransactionPlan, cluster_index: int, slot: int) -> ServerTransaction:
        """Return the transaction at a slot's server."""
        cluster = self._clusters[cluster_index]
        master = cluster.slots.owners[slot]
        if master is None:
            raise ClusterDownError
        key = cluster_index, cluster.active_server(master)
        found = plan.transactions.get(key)
        if found is None:
            found = ServerTransaction(len(plan.transactions), cluster_index, cluster, key[1])
            plan.transactions[key] = found
        return found
