"""What a client may be told went wrong: one class per wire code, the texts exactly as Redis 7.4 has them.

    ReplyError
    ├── PlainError          ERR          everything without a code of its own
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
    ProtocolError           answered with ERR, then the connection is closed

Texts may hold bytes of a client's own that are no UTF-8; they travel as surrogate escapes.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from typing import ClassVar

from state_backend.model.errors import JobLoadingError, SlotLoadingError, StoreDamagedError, StoreError, WrongKindError

log = logging.getLogger(__name__)

# In bytes of the message's part that repeats what was typed; standard: Redis' own limit.
ECHO_BYTES_MAX = 128


class ReplyError(Exception):
    """An answer that begins with `-`: a wire code and a text."""

    code: ClassVar[str]
    by_code: ClassVar[dict[str, type[ReplyError]]] = {}

    def __init_subclass__(cls, code: str) -> None:
        if code in ReplyError.by_code:
            raise TypeError(f"{cls.__name__}: {ReplyError.by_code[code].__name__} has the code {code} already")
        cls.code = code
        ReplyError.by_code[code] = cls

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    @property
    def line(self) -> bytes:
        """The error as it is sent, between `-` and the line's end."""
        return _one_line(f"{self.code} {self.text}")


class PlainError(ReplyError, code="ERR"):
    """Anything without a code of its own."""


class WrongTypeError(ReplyError, code="WRONGTYPE"):
    """The key holds another kind of value."""

    def __init__(self) -> None:
        super().__init__("Operation against a key holding the wrong kind of value")


class ReadOnlyError(ReplyError, code="READONLY"):
    """A write; nothing is ever written here."""

    def __init__(self) -> None:
        super().__init__("You can't write against a read only replica.")


class NoAuthError(ReplyError, code="NOAUTH"):
    """A password is needed first."""

    def __init__(self, text: str = "Authentication required.") -> None:
        super().__init__(text)


class WrongPassError(ReplyError, code="WRONGPASS"):
    """The password, or the user, is not right."""

    def __init__(self) -> None:
        super().__init__("invalid username-password pair or user is disabled.")


class NoPermError(ReplyError, code="NOPERM"):
    """The user may not do that."""


class NoProtoError(ReplyError, code="NOPROTO"):
    """HELLO asked for a version other than 2 and 3."""

    def __init__(self) -> None:
        super().__init__("unsupported protocol version")


class NoScriptError(ReplyError, code="NOSCRIPT"):
    """EVALSHA of a script that was never loaded."""

    def __init__(self) -> None:
        super().__init__("No matching script. Please use EVAL.")


class LoadingError(ReplyError, code="LOADING"):
    """Some job cannot be read yet: an answer now could be a wrong nil."""

    def __init__(self, message: str = "Redis is loading the dataset in memory") -> None:
        super().__init__(message)


class MovedError(ReplyError, code="MOVED"):
    """The key's slot is another node's."""

    def __init__(self, slot: int, address: str) -> None:
        super().__init__(f"{slot} {address}")


class CrossSlotError(ReplyError, code="CROSSSLOT"):
    """Keys of several slots in one request to a cluster's node."""

    def __init__(self) -> None:
        super().__init__("Keys in request don't hash to the same slot")


class ClusterDownError(ReplyError, code="CLUSTERDOWN"):
    """Nobody owns the key's slot, or its owner has yet to load it."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(f"Hash slot not served: {reason}" if reason else "Hash slot not served")


class TryAgainError(ReplyError, code="TRYAGAIN"):
    """A proxy's servers do not agree on who answers; soon they will."""


class ExecAbortError(ReplyError, code="EXECABORT"):
    """A transaction that is not run, because one of its commands was refused, or EXEC is."""

    def __init__(self, error: ReplyError | None = None) -> None:
        if error is None:
            super().__init__("Transaction discarded because of previous errors.")
        else:
            text = error.text if isinstance(error, PlainError) else f"{error.code} {error.text}"
            super().__init__(f"Transaction discarded because of: {text}")


class NoEpochError(ReplyError, code="NOEPOCH"):
    """An epoch that was asked for is not readable here, now; the text says which ones are."""


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
    """The peer does not speak the protocol: one answer, then the connection is closed."""

    @property
    def line(self) -> bytes:
        """The error as it is sent."""
        return _one_line(f"ERR Protocol error: {self}")


class QueryBufferError(ProtocolError):
    """A request larger than the query buffer may be; closed without an answer, as Redis does."""


def _one_line(text: str) -> bytes:
    """Return a text that may be sent as an error; a line break within becomes a space."""
    return text.replace("\r", " ").replace("\n", " ").encode("utf-8", "surrogateescape")


def typed(word: bytes) -> str:
    """Return what a client typed as it stands in a text."""
    return _c_text(word).decode("utf-8", "surrogateescape")


def _c_text(word: bytes) -> bytes:
    """Return a text up to a zero byte, which ends a text of Redis."""
    return word.partition(b"\0")[0]


def syntax_error() -> PlainError:
    """Return what any argument out of place is answered with."""
    return PlainError("syntax error")


def not_an_integer() -> PlainError:
    """Return what a malformed number, or one beyond 64 bits, is answered with."""
    return PlainError("value is not an integer or out of range")


def wrong_arity(name: str) -> PlainError:
    """Return the error for a wrong number of arguments; `name` is canonical (`client|setname`)."""
    return PlainError(f"wrong number of arguments for '{name}' command")


def unknown_command(request: Sequence[bytes]) -> PlainError:
    """Return the error that clients parse: the name and the arguments as typed, cut, a space at the end."""
    echoed = b""
    for word in request[1:]:
        if len(echoed) >= ECHO_BYTES_MAX:
            break
        echoed += b"'%b' " % _c_text(word[: ECHO_BYTES_MAX - len(echoed)])
    name = typed(request[0][:ECHO_BYTES_MAX])
    args = echoed.decode("utf-8", "surrogateescape")
    return PlainError(f"unknown command '{name}', with args beginning with: {args}")


def unknown_subcommand(container: str, word: bytes) -> PlainError:
    """Return the error for `CLIENT FOO`."""
    return PlainError(f"unknown subcommand '{typed(word[:ECHO_BYTES_MAX])}'. Try {container.upper()} HELP.")


def wrong_subcommand(container: str, word: bytes) -> PlainError:
    """Return the error for too many arguments of a subcommand that takes some or none; `word` is it, as typed."""
    name = typed(word[:ECHO_BYTES_MAX])
    return PlainError(f"unknown subcommand or wrong number of arguments for '{name}'. Try {container.upper()} HELP.")


def not_served(name: str) -> PlainError:
    """Return the error for a command of Redis that is neither a write nor served here."""
    return PlainError(f"command '{name}' is not served by sparkis")


def cluster_disabled() -> PlainError:
    """Return what CLUSTER, READONLY, READWRITE and ASKING are answered with outside of a cluster."""
    return PlainError("This instance has cluster support disabled")


def cluster_is_static(name: str) -> PlainError:
    """Return what a command that would change a cluster is answered with by one of its nodes."""
    return PlainError(f"command '{name}' is not served by sparkis: its nodes are told a topology and never change it")


def internal_error(error: BaseException) -> PlainError:
    """Log an exception that nobody expected, with its traceback, under an id; return what a client is told of it."""
    error_id = secrets.token_hex(4)
    log.error("internal error %s", error_id, exc_info=error)
    return PlainError(f"internal error {error_id}")


def reply_error_of(error: StoreError, *, is_node: bool = False) -> ReplyError:
    """Turn an error of the state below into what the client is told, by a node of a cluster or another server.

    Of slots that are loaded a node says what makes cluster clients ask again with slots read anew: redis-py some ten
    times in 2.5 s, ioredis sixteen times in 1.6 s; node-redis does so after MOVED alone. LOADING they pass on; after
    TRYAGAIN they do not look who the owner is by now, and redis-py gives up after 0.4 s. Plain clients ask again after
    LOADING.
    """
    if isinstance(error, WrongKindError):
        return WrongTypeError()
    if isinstance(error, SlotLoadingError):
        return ClusterDownError(str(error)) if is_node else LoadingError(str(error))
    is_loading = isinstance(error, (JobLoadingError, StoreDamagedError))
    return LoadingError(str(error)) if is_loading else PlainError(str(error))
