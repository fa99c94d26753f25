"""The state of one connection apart from its socket; commands read and change it."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

from resp_server import native
from resp_server.session.account import Account
from resp_server.session.epoch_feed import EpochFeed
from resp_server.session.epochs import SeenEpochs
from resp_server.session.subscriptions import SubscriptionKind, Subscriptions
from resp_server.session.tracking import TrackingState
from resp_server.session.transaction import ReadPoint, Transaction, WatchedVersion

RESP2 = 2
RESP3 = 3


class ReplyMode(Enum):
    """The mode that CLIENT REPLY set. SKIP_NEXT becomes SKIP when the command to suppress begins."""

    ON = "on"
    OFF = "off"
    SKIP_NEXT = "skip next"
    SKIP = "skip"


if TYPE_CHECKING or native.client_fields is None:

    class SessionFields:
        """The fields of a session that the compiled core uses with each request; C fields, if it is built."""

        __slots__ = (
            "active_ms",
            "calls",
            "can_be_forwarded",
            "can_call",
            "can_queue",
            "can_use_checked_fast_path",
            "can_use_fast_path",
            "epoch_feed",
            "input_bytes",
            "last_command",
            "output_bytes",
            "protocol",
            "pushed",
            "reads_committed",
            "subscriptions",
            "tracking_state",
            "transaction",
            "user",
        )

else:
    SessionFields = native.client_fields.SessionFields


class Session(SessionFields):
    """The state of one client's connection.

    Attributes:
        can_use_fast_path: The client is authenticated as an unrestricted user without a rate limit; it is in database 0
            and not closing; its replies are on; it has no transaction, subscription or tracking; and this server does
            not redirect it. (A replica in a cluster redirects clients until they send READONLY.)
        can_use_checked_fast_path: The same, but the user may be restricted, and the client may track keys.
        can_queue: As `can_use_checked_fast_path`, but the client has a transaction.
        can_be_forwarded: As `can_use_fast_path`, but in any database, the client may track keys, and it reads values
            before their commit. Only a proxy's compiled code uses it: the forwarder keeps databases apart.
        can_call: The core may call the functions of commands (`pipeline.keyless_commands`): the client is authenticated
            as a user without a rate limit, and not closing; its replies are on; it has no transaction.
        pushed: The pushes to the client while the core calls a command for it; None: it calls none.
        is_observed: The fast path is off for all connections, because requests are monitored, timed or paused one by
            one.
        is_paused: CLIENT PAUSE stopped the client.
        replies_suppressed: The current command's reply is suppressed.
        reads_committed: Reads take committed values only (STATE FRESHNESS).
        calls: The answered requests, counted with their batch.
        input_bytes: The bytes that the connection has received.
        output_bytes: The bytes that were sent, or will be.
        seen: The epochs of the replies so far. Only a proxy fills it, because its servers may be an epoch apart.
    """

    # Read with few cache misses, as in `Connection`.
    __slots__ = (
        "_is_logged_in",
        "address",
        "created_ms",
        "db",
        "default_user",
        "id",
        "is_at_replica",
        "is_authenticated",
        "is_closing",
        "is_monitor",
        "is_no_evict",
        "is_no_touch",
        "is_observed",
        "is_paused",
        "is_readonly",
        "lib_name",
        "lib_ver",
        "local_address",
        "name",
        "read_point",
        "replies_suppressed",
        "reply_mode",
        "seen",
        "watched",
    )

    def __init__(self, session_id: int, address: str, local_address: str, default_user: Account, now_ms: int) -> None:
        self.id = session_id
        self.address = address
        self.local_address = local_address
        self.default_user = default_user
        self.created_ms = now_ms
        self.active_ms = now_ms
        self.last_command = ""
        self.calls = self.input_bytes = self.output_bytes = 0
        self.lib_name = b""
        self.lib_ver = b""
        self.is_no_evict = False
        self.is_no_touch = False
        self.is_closing = False
        self.subscriptions: Subscriptions | None = None
        self.tracking_state: TrackingState | None = None
        self.pushed: list[bytes] | None = None
        self.is_at_replica = False
        self.is_observed = False
        self.is_monitor = False
        self.is_paused = False
        self.reply_mode = ReplyMode.ON
        self.seen = SeenEpochs()
        self.restart()

    def restart(self) -> None:
        """Return to the state of a new connection (RESET); the address, the library's name and the age stay."""
        self.protocol = RESP2
        self.user = self.default_user
        self._is_logged_in = self.user.is_open
        self.db = 0
        self.name = b""
        self.is_readonly = False
        self.reads_committed = self.user.reads_committed
        self.epoch_feed: EpochFeed | None = None
        # CLIENT REPLY SKIP suppresses RESET's reply, too.
        self.reply_mode = ReplyMode.SKIP if self.reply_mode is ReplyMode.SKIP else ReplyMode.ON
        self.end_transaction()

    @property
    def is_as_new(self) -> bool:
        """Return whether RESET would change nothing here, as of most clients that send it again and again."""
        return (
            self.can_use_fast_path  # so it has no transaction, subscriptions or tracking, and is in database 0
            and self.user is self.default_user
            and self._is_logged_in
            and self.user.is_open
            and self.protocol == RESP2
            and self.epoch_feed is None
            and self.reads_committed is self.user.reads_committed
            and not (self.name or self.is_readonly or self.watched)
            and self.read_point is None
        )

    def _update_flags(self) -> None:
        """Set the flags again that follow from the login, the reply mode, the user and subscriptions."""
        self.is_authenticated = self._is_logged_in or self.default_user.is_open
        self.replies_suppressed = self.reply_mode is not ReplyMode.ON
        can_run = (
            self.is_authenticated
            and not self.replies_suppressed
            and self.user.rate_limiter is None
            and not self.is_closing
            and not self.is_observed
        )
        is_redirected = self.is_at_replica and not self.is_readonly
        is_plain = can_run and not is_redirected and self.subscriptions is None
        self.can_queue = is_plain and self.transaction is not None and self.db == 0
        is_forwardable = is_plain and self.transaction is None
        self.can_call = can_run and self.transaction is None
        is_unrestricted = is_forwardable and self.user.is_unrestricted
        self.can_be_forwarded = is_unrestricted and not self.reads_committed
        self.can_use_checked_fast_path = is_forwardable and self.db == 0
        self.can_use_fast_path = is_unrestricted and self.db == 0 and self.tracking_state is None

    def begin_transaction(self) -> None:
        """Queue commands from now on."""
        self.transaction: Transaction | None = Transaction()
        self._update_flags()

    def resume_transaction(self, transaction: Transaction) -> None:
        """Return to a transaction whose EXEC has not run."""
        self.transaction = transaction
        self._update_flags()

    def end_transaction(self) -> None:
        """Drop queued commands and watched keys."""
        self.transaction = None
        # The marks of watched keys, by database and key.
        self.watched: dict[tuple[int, bytes], WatchedVersion] = {}
        self.read_point: ReadPoint | None = None
        self._update_flags()

    def authenticate(self, user: Account) -> None:
        """Log the client in as a user."""
        if user is not self.user or not self._is_logged_in:
            user.was_used = True
            self.user, self._is_logged_in = user, True
            self.reads_committed = user.reads_committed
            self._update_flags()

    def log_out(self) -> None:
        """Log the client out: its user was removed."""
        self.user = self.default_user
        self._is_logged_in = False
        self.reads_committed = self.user.reads_committed
        self._update_flags()

    def refresh_user(self) -> None:
        """Apply changed rights of the user."""
        self._update_flags()

    @property
    def rate_limiter(self) -> Any:
        """The `RateLimiter` of the user; None: no limit, or the client has not logged in, so that it is no user yet."""
        return self.user.rate_limiter if self.is_authenticated else None

    @property
    def next_db(self) -> int:
        """The database of the next request: within MULTI the one that a queued SELECT names."""
        queued = None if self.transaction is None else self.transaction.db
        return self.db if queued is None else queued

    def select(self, db: int) -> None:
        """Select a database."""
        self.db = db
        self._update_flags()

    def set_reply_mode(self, mode: ReplyMode) -> None:
        """Send or suppress replies."""
        if mode is not self.reply_mode:
            self.reply_mode = mode
            self._update_flags()

    def close(self) -> None:
        """Process no more requests; the connection ends once all replies are sent."""
        self.is_closing = True
        self._update_flags()

    def is_subscribed(self, kind: SubscriptionKind, name: bytes) -> bool:
        """Return whether the client is subscribed to a channel, or to exactly this pattern."""
        return self.subscriptions is not None and name in self.subscriptions.by_kind[kind]

    def set_subscriptions(self, subscriptions: Subscriptions) -> None:
        """Set the client's subscriptions."""
        had_none = self.subscriptions is None
        self.subscriptions = subscriptions if len(subscriptions) else None
        if had_none or self.subscriptions is None:
            self._update_flags()

    def set_tracking(self, tracking_state: TrackingState | None) -> None:
        """Set the client's tracking; None: off."""
        self.tracking_state = tracking_state
        self._update_flags()

    def set_readonly(self, is_readonly: bool) -> None:
        """Accept a replica's replies (READONLY), or redirections to its master (READWRITE)."""
        if is_readonly != self.is_readonly:
            self.is_readonly = is_readonly
            self._update_flags()

    def set_reads_committed(self, reads_committed: bool) -> None:
        """Read committed values only, or the newest ones (STATE FRESHNESS)."""
        self.reads_committed = reads_committed
        self._update_flags()

    def set_at_replica(self, is_replica: bool) -> None:
        """Set whether the server is a replica in a cluster."""
        self.is_at_replica = is_replica
        self._update_flags()

    def set_observed(self, is_observed: bool) -> None:
        """Set whether each request is monitored, timed or paused individually."""
        self.is_observed = is_observed
        self._update_flags()

    def begin_command(self) -> None:
        """Advance CLIENT REPLY SKIP: it suppresses the next reply only."""
        if self.reply_mode is ReplyMode.SKIP_NEXT:
            self.set_reply_mode(ReplyMode.SKIP)
        elif self.reply_mode is ReplyMode.SKIP:
            self.set_reply_mode(ReplyMode.ON)

    @property
    def gets_messages_as_replies(self) -> bool:
        """Return whether the client gets messages in the form of replies, so that it may send few commands only."""
        return self.subscriptions is not None and self.protocol == RESP2

    @property
    def is_subscriber(self) -> bool:
        """Return whether the limits of subscribers apply: with subscriptions, or after MONITOR."""
        return self.subscriptions is not None or self.is_monitor
