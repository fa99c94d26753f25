"""What a connection is, apart from its socket: a value that commands read and change."""

from __future__ import annotations

from enum import Enum

from resp_server.protocol.following import Following
from resp_server.protocol.subscriptions import Subscriptions
from resp_server.protocol.transaction import Mark, ReadsAt, Transaction

RESP2 = 2


class ReplyMode(Enum):
    """What CLIENT REPLY asked for. SKIP_NEXT is SKIP until the command that it silences has begun."""

    ON = "on"
    OFF = "off"
    SKIP_NEXT = "skip next"
    SKIP = "skip"


class Session:
    """One client's standing.

    is_plain is the one flag that the hot path asks: authenticated, database 0, replies on, nothing queued, staying, and
    answered here: a cluster's replica sends clients to its master until they say READONLY. Whatever takes a connection
    off the short way has to take it away.
    """

    def __init__(self, session_id: int, address: str, local_address: str, needs_auth: bool, now_ms: int) -> None:
        self.id = session_id
        self.address = address
        self.local_address = local_address
        self.needs_auth = needs_auth
        self.created_ms = now_ms
        self.active_ms = now_ms
        self.last_command = ""
        self.lib_name = b""
        self.lib_ver = b""
        self.is_no_evict = False
        self.is_no_touch = False
        self.is_closing = False
        self.subscriptions: Subscriptions | None = None
        self.is_at_replica = False
        self.reply_mode = ReplyMode.ON
        self.restart()

    def restart(self) -> None:
        """Be as just connected, as RESET asks for; the address, the library's name and the age stay."""
        self.protocol = RESP2
        self.is_authenticated = not self.needs_auth
        self.db = 0
        self.name = b""
        self.is_readonly = False
        self.following: Following | None = None
        # A CLIENT REPLY SKIP before it silences RESET as any other command.
        self.reply_mode = ReplyMode.SKIP if self.reply_mode is ReplyMode.SKIP else ReplyMode.ON
        self.end_transaction()

    def _settle(self) -> None:
        replies = self.reply_mode is ReplyMode.ON
        is_answered_here = self.is_readonly or not self.is_at_replica
        is_here_and_now = is_answered_here and self.transaction is None and self.subscriptions is None
        self.is_plain = self.is_authenticated and self.db == 0 and replies and not self.is_closing and is_here_and_now

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

    def authenticate(self) -> None:
        """Let the client in."""
        self.is_authenticated = True
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

    def subscribe(self, subscriptions: Subscriptions) -> None:
        """Take what the client is subscribed to from now on."""
        self.subscriptions = subscriptions if len(subscriptions) else None
        self._settle()

    def read_only(self, is_readonly: bool) -> None:
        """Take a replica's answers, or be sent to its master, as READONLY and READWRITE ask for."""
        self.is_readonly = is_readonly
        self._settle()

    def serve_from(self, is_replica: bool) -> None:
        """Learn whether the server is a cluster's replica."""
        self.is_at_replica = is_replica
        self._settle()

    def begin_command(self) -> None:
        """Count down a CLIENT REPLY SKIP: the command after it is silenced, the one after that is not."""
        if self.reply_mode is ReplyMode.SKIP_NEXT:
            self.reply(ReplyMode.SKIP)
        elif self.reply_mode is ReplyMode.SKIP:
            self.reply(ReplyMode.ON)

    @property
    def is_silent(self) -> bool:
        """Tell whether the reply of the command in hand is to be kept back."""
        return self.reply_mode is not ReplyMode.ON
