"""What a connection is, apart from its socket: a value that commands read and change."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

from resp_server.session.epoch_feed import EpochFeed, Seen
from resp_server.session.subscriptions import Subscriptions, Way
from resp_server.session.tracking import TrackingState
from resp_server.session.transaction import Mark, ReadsAt, Transaction

RESP2 = 2


class ReplyMode(Enum):
    """What CLIENT REPLY asked for. SKIP_NEXT is SKIP until the command that it silences has begun."""

    ON = "on"
    OFF = "off"
    SKIP_NEXT = "skip next"
    SKIP = "skip"


class Account(Protocol):
    """What a connection knows of its user (see `resp_server.acl.rules.User`).

    is_open: everybody is this user without a password. is_unrestricted: nothing it asks for has to be checked.
    rate_limiter: None if the user may ask as much as it likes. compiled: its rules as the compiled core checks them.
    What these say may change at any time.
    """

    name: bytes
    rate_limiter: Any
    compiled: Any

    @property
    def is_open(self) -> bool: ...
    @property
    def is_unrestricted(self) -> bool: ...
    @property
    def reads_all_keys(self) -> bool: ...
    @property
    def read_patterns(self) -> Sequence[bytes]: ...
    def can_read(self, key: bytes) -> bool:
        """Tell whether it may be told of a key."""

    def can_subscribe(self, channel: bytes, *, is_pattern: bool = False) -> bool:
        """Tell whether it may use a channel, or a pattern of channels."""

    def denial(self, command: Any, request: Sequence[bytes]) -> Any:
        """Say why a request is denied, or None."""


class Session:
    """One client's standing.

    user says what it may do; `default_user` is whom it was when it came. is_usual: is_plain, but for what its user
    may not do, and for tracking what it reads.

    is_plain is the one flag that the hot path asks: authenticated, database 0, replies on, nothing queued, staying, and
    answered here: a cluster's replica sends clients to its master until they say READONLY. Whatever takes a connection
    off the short way has to take it away; `is_observed` is for what takes all connections off it.
    """

    def __init__(self, session_id: int, address: str, local_address: str, default_user: Account, now_ms: int) -> None:
        self.id = session_id
        self.address = address
        self.local_address = local_address
        self.default_user = default_user
        self.created_ms = now_ms
        self.active_ms = now_ms
        self.last_command = ""
        self.lib_name = b""
        self.lib_ver = b""
        self.is_no_evict = False
        self.is_no_touch = False
        self.is_closing = False
        self.subscriptions: Subscriptions | None = None
        self.tracked: TrackingState | None = None
        self.is_at_replica = False
        self.is_observed = False
        self.is_monitor = False
        self.is_held_back = False  # by CLIENT PAUSE
        self.reply_mode = ReplyMode.ON
        # For a proxy, whose servers may be an epoch apart.
        self.seen = Seen()
        self.restart()

    def restart(self) -> None:
        """Be as just connected, as RESET asks for; the address, the library's name and the age stay."""
        self.protocol = RESP2
        self.user = self.default_user
        self._is_logged_in = self.user.is_open
        self.db = 0
        self.name = b""
        self.is_readonly = False
        self.epoch_feed: EpochFeed | None = None
        # A CLIENT REPLY SKIP before it silences RESET as any other command.
        self.reply_mode = ReplyMode.SKIP if self.reply_mode is ReplyMode.SKIP else ReplyMode.ON
        self.end_transaction()

    def _settle(self) -> None:
        self.is_authenticated = self._is_logged_in or self.default_user.is_open
        replies = self.reply_mode is ReplyMode.ON
        is_answered_here = (self.is_readonly or not self.is_at_replica) and not self.is_observed
        is_here_and_now = is_answered_here and self.transaction is None and self.subscriptions is None
        is_unlimited = self.user.rate_limiter is None and not self.is_closing
        self.is_usual = self.is_authenticated and self.db == 0 and replies and is_unlimited and is_here_and_now
        self.is_plain = self.is_usual and self.tracked is None and self.user.is_unrestricted

    def begin_transaction(self) -> None:
        """Queue what comes from now on."""
        self.transaction: Transaction | None = Transaction()
        self._settle()

    def end_transaction(self) -> None:
        """Forget what is queued, and what is watched for it."""
        self.transaction = None
        self.watched: dict[tuple[int, bytes], Mark] = {}  # by database and key
        self.reads_at: ReadsAt | None = None
        self._settle()

    def authenticate(self, user: Account) -> None:
        """Let the client in, as a user."""
        self.user = user
        self._is_logged_in = True
        self._settle()

    def log_out(self) -> None:
        """Be nobody any more: the user is gone."""
        self.user = self.default_user
        self._is_logged_in = False
        self._settle()

    def look_at_user(self) -> None:
        """Take in that what users may do has changed."""
        self._settle()

    def select(self, db: int) -> None:
        """Move to another database."""
        self.db = db
        self._settle()

    def reply(self, mode: ReplyMode) -> None:
        """Send replies, or keep them back."""
        self.reply_mode = mode
        self._settle()

    def close(self) -> None:
        """Answer nothing more; the connection ends once what was answered is sent."""
        self.is_closing = True
        self._settle()

    def is_subscribed(self, way: Way, name: bytes) -> bool:
        """Tell whether the client is subscribed to a channel, or to a pattern as it was written."""
        return self.subscriptions is not None and name in self.subscriptions.of(way)

    def subscribe(self, subscriptions: Subscriptions) -> None:
        """Take what the client is subscribed to from now on."""
        self.subscriptions = subscriptions if len(subscriptions) else None
        self._settle()

    def track(self, tracked: TrackingState | None) -> None:
        """Take how the client tracks what it reads from now on; None: not at all."""
        self.tracked = tracked
        self._settle()

    def read_only(self, is_readonly: bool) -> None:
        """Take a replica's answers, or be sent to its master, as READONLY and READWRITE ask for."""
        self.is_readonly = is_readonly
        self._settle()

    def serve_from(self, is_replica: bool) -> None:
        """Learn whether the server is a cluster's replica."""
        self.is_at_replica = is_replica
        self._settle()

    def observe(self, is_observed: bool) -> None:
        """Learn whether each request is looked at by itself: to be shown to others, measured, or held back."""
        self.is_observed = is_observed
        self._settle()

    def begin_command(self) -> None:
        """Count down a CLIENT REPLY SKIP: the command after it is silenced, the one after that is not."""
        if self.reply_mode is ReplyMode.SKIP_NEXT:
            self.reply(ReplyMode.SKIP)
        elif self.reply_mode is ReplyMode.SKIP:
            self.reply(ReplyMode.ON)

    @property
    def is_subscriber(self) -> bool:
        """Tell whether it is sent what others do, so that the limits of subscribers hold; after MONITOR as well."""
        return self.subscriptions is not None or self.is_monitor

    @property
    def is_silent(self) -> bool:
        """Tell whether the reply of the command in hand is to be kept back."""
        return self.reply_mode is not ReplyMode.ON
