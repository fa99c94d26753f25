"""The errors for clients: one class per wire code, with exactly the texts of Redis 7.4.

    ReplyError
    ├── GenericError        ERR          errors without a code of their own
    ├── WrongTypeError      WRONGTYPE
    ├── ReadOnlyError       READONLY
    ├── NoAuthError         NOAUTH
    ├── WrongPassError      WRONGPASS
    ├── NoPermError         NOPERM
    ├── NoProtoError        NOPROTO
    ├── NoScriptError       NOSCRIPT
    ├── LoadingError        LOADING
    ├── MovedError          MOVED
    ├── CrossSlotError      CROSSSLOT
    ├── ClusterDownError    CLUSTERDOWN
    ├── TryAgainError       TRYAGAIN
    ├── ExecAbortError      EXECABORT
    ├── NoEpochError        NOEPOCH      ours: see STATE AT
    └── DeniedError         DENIED
    ProtocolError           the reply is ERR, then the connection is closed

Texts may contain bytes from a client that are not UTF-8, as surrogate escapes.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from typing import ClassVar

from state_backend.model.errors import JobLoadingError, SlotLoadingError, StoreDamagedError, StoreError, WrongKindError

log = logging.getLogger("sparkis.clients")

# The limit of the part of a message that repeats the client's arguments; standard: the limit of Redis.
ECHO_BYTES_MAX = 128


class ReplyError(Exception):
    """An error reply: a wire code and a text."""

    code: ClassVar[str]
    by_code: ClassVar[dict[str, type[ReplyError]]] = {}

    def __init_subclass__(cls, code: str) -> None:
        if code in ReplyError.by_code:
            raise TypeError(f"{cls.__name__}: {ReplyError.by_code[code].__name__} has the code {code} already")
        cls.code = code
        ReplyError.by_code[code] = cls

    def __init__(self, text: str) -> None:
        self.text = text  # `args` has it as well: `BaseException.__new__` sets them

    @property
    def line(self) -> bytes:
        """The bytes of the error between `-` and the line end."""
        return _one_line(f"{self.code} {self.text}")


class GenericError(ReplyError, code="ERR"):
    """An error without a code of its own."""


class WrongTypeError(ReplyError, code="WRONGTYPE"):
    """The key has a value of another kind."""

    def __init__(self) -> None:
        super().__init__("Operation against a key holding the wrong kind of value")


class ReadOnlyError(ReplyError, code="READONLY"):
    """A write command; all servers here are read-only."""

    def __init__(self) -> None:
        super().__init__("You can't write against a read only replica.")


class NoAuthError(ReplyError, code="NOAUTH"):
    """The client has to authenticate first."""

    def __init__(self, text: str = "Authentication required.") -> None:
        super().__init__(text)


class WrongPassError(ReplyError, code="WRONGPASS"):
    """The password or the user name is wrong."""

    def __init__(self) -> None:
        super().__init__("invalid username-password pair or user is disabled.")


class NoPermError(ReplyError, code="NOPERM"):
    """The user lacks the permission."""


class NoProtoError(ReplyError, code="NOPROTO"):
    """HELLO asked for a version other than 2 and 3."""

    def __init__(self) -> None:
        super().__init__("unsupported protocol version")


class NoScriptError(ReplyError, code="NOSCRIPT"):
    """EVALSHA of a script that was never loaded."""

    def __init__(self) -> None:
        super().__init__("No matching script. Please use EVAL.")


class LoadingError(ReplyError, code="LOADING"):
    """A job is not readable yet: a reply now could be a wrong nil."""

    def __init__(self, message: str = "Redis is loading the dataset in memory") -> None:
        super().__init__(message)


class MovedError(ReplyError, code="MOVED"):
    """Another node owns the key's slot."""

    def __init__(self, slot: int, address: str) -> None:
        super().__init__(f"{slot} {address}")


class CrossSlotError(ReplyError, code="CROSSSLOT"):
    """Keys of several slots in one request to a cluster's node."""

    def __init__(self) -> None:
        super().__init__("Keys in request don't hash to the same slot")


class ClusterDownError(ReplyError, code="CLUSTERDOWN"):
    """No node owns the key's slot, or its owner is loading it."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(f"Hash slot not served: {reason}" if reason else "Hash slot not served")


class TryAgainError(ReplyError, code="TRYAGAIN"):
    """The request cannot be answered now, such as at a proxy whose servers disagree; a retry may succeed."""


class ExecAbortError(ReplyError, code="EXECABORT"):
    """A transaction that does not run, because one of its commands, or EXEC itself, was refused."""

    def __init__(self, error: ReplyError | None = None) -> None:
        if error is None:
            super().__init__("Transaction discarded because of previous errors.")
        else:
            text = error.text if isinstance(error, GenericError) else f"{error.code} {error.text}"
            super().__init__(f"Transaction discarded because of: {text}")


class NoEpochError(ReplyError, code="NOEPOCH"):
    """A requested epoch is not readable here now; the text lists the readable epochs."""


class WrongLogError(ReplyError, code="WRONGLOG"):
    """A registry's refusal of a server that serves another log."""


class DeniedError(ReplyError, code="DENIED"):
    """Protected mode: no password is set and the client is on another machine."""

    def __init__(self) -> None:
        super().__init__(
            "Redis is running in protected mode because protected mode is enabled and no password is set for the "
            "default user. In this mode connections are only accepted from the loopback interface. If you want to "
            "connect from external computers, either set a password, or turn the protected mode off and MAKE SURE "
            "that the server is not publicly accessible from internet if you do so."
        )


class ProtocolError(Exception):
    """The peer violates the protocol: one error reply, then the connection is closed."""

    @property
    def line(self) -> bytes:
        """The bytes of the error between `-` and the line end."""
        return _one_line(f"ERR Protocol error: {self}")


class QueryBufferError(ProtocolError):
    """A request larger than the query buffer's limit; the connection is closed without a reply, as in Redis."""


def _one_line(text: str) -> bytes:
    """Return the bytes of a text on one line: line breaks become spaces."""
    if "\n" in text or "\r" in text:
        text = text.replace("\r", " ").replace("\n", " ")
    return text.encode("utf-8", "surrogateescape")


def client_text(argument: bytes) -> str:
    """Return a client's argument as text for a message."""
    return c_text(argument).decode("utf-8", "surrogateescape")


def c_text(argument: bytes) -> bytes:
    """Return a text up to its first zero byte, as C does."""
    return argument.partition(b"\0")[0]


def syntax_error() -> GenericError:
    """Return the error for an unexpected argument."""
    return GenericError("syntax error")


def no_frequency() -> GenericError:
    """Return the error for OBJECT FREQ of a key, as no access is counted."""
    return GenericError(
        "An LFU maxmemory policy is not selected, access frequency not tracked. Please note that when switching "
        "between policies at runtime LRU and LFU data will take some time to adjust."
    )


def not_an_integer() -> GenericError:
    """Return the error for a malformed integer, or one beyond 64 bits."""
    return GenericError("value is not an integer or out of range")


def wrong_arity(name: str) -> GenericError:
    """Return the error for a wrong number of arguments; `name` is canonical (`client|setname`)."""
    return GenericError(f"wrong number of arguments for '{name}' command")


def unknown_command(request: Sequence[bytes]) -> GenericError:
    """Return the error that clients parse: the name and the arguments as typed, cut, a space at the end."""
    echoed = b""
    for argument in request[1:]:
        if len(echoed) >= ECHO_BYTES_MAX:
            break
        echoed += b"'%b' " % c_text(argument[: ECHO_BYTES_MAX - len(echoed)])
    name = client_text(request[0][:ECHO_BYTES_MAX])
    args = echoed.decode("utf-8", "surrogateescape")
    return GenericError(f"unknown command '{name}', with args beginning with: {args}")


def unknown_subcommand(container: str, argument: bytes) -> GenericError:
    """Return the error for `CLIENT FOO`."""
    return GenericError(f"unknown subcommand '{client_text(argument[:ECHO_BYTES_MAX])}'. Try {container.upper()} HELP.")


def wrong_subcommand(container: str, argument: bytes) -> GenericError:
    """Return the error for too many arguments of a subcommand; `argument` is its name as typed."""
    name = client_text(argument[:ECHO_BYTES_MAX])
    return GenericError(f"unknown subcommand or wrong number of arguments for '{name}'. Try {container.upper()} HELP.")


def not_served(name: str) -> GenericError:
    """Return the error for a command of Redis that is neither a write nor served here."""
    return GenericError(f"command '{name}' is not served by sparkis")


def cluster_disabled() -> GenericError:
    """Return the error for CLUSTER, READONLY, READWRITE and ASKING outside of a cluster."""
    return GenericError("This instance has cluster support disabled")


def cluster_is_static(name: str) -> GenericError:
    """Return a node's error for a command that would change the cluster."""
    return GenericError(f"command '{name}' is not served by sparkis: a node does not change its topology")


def not_for_subscribers(name: str) -> GenericError:
    """Return the error for a command that a subscribed client of RESP2 may not send."""
    return GenericError(
        f"Can't execute '{name}': only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / QUIT / RESET are allowed in this "
        "context"
    )


def internal_error(error: BaseException) -> GenericError:
    """Log an unexpected exception with its traceback under an id; return the client's error, with the id."""
    error_id = secrets.token_hex(4)
    log.error("internal error %s", error_id, exc_info=error)
    return GenericError(f"internal error {error_id}")


def reply_error_of(error: StoreError, *, is_node: bool = False) -> ReplyError:
    """Convert a store's error to a client's error;

    While a slot is being loaded, a node replies CLUSTERDOWN. Cluster clients then read the slots again and retry:
    redis-py ten times in 2.5 s, ioredis sixteen times in 1.6 s. (node-redis does so only after MOVED.) Cluster clients
    pass LOADING on to their users. After TRYAGAIN they do not read the slots again, and redis-py gives up after 0.4 s.
    Clients without cluster mode retry after LOADING.

    Args:
        is_node: The client talks to a node of a cluster.
    """
    if isinstance(error, WrongKindError):
        return WrongTypeError()
    if isinstance(error, SlotLoadingError):
        return ClusterDownError(str(error)) if is_node else LoadingError(str(error))
    is_loading = isinstance(error, (JobLoadingError, StoreDamagedError))
    return LoadingError(str(error)) if is_loading else GenericError(str(error))
