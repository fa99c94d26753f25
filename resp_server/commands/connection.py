"""Commands about the connection itself: HELLO, AUTH, SELECT, PING and others. CLIENT is in `client`."""

from __future__ import annotations

import re

from resp_server.acl.denial import Reason
from resp_server.acl.user import DEFAULT_USER
from resp_server.command.handler import check_32_bits, command, integer
from resp_server.pipeline.context import CommandContext, ServerContext
from resp_server.protocol.errors import (
    GenericError,
    NoAuthError,
    NoProtoError,
    ReplyError,
    WrongPassError,
    client_text,
    syntax_error,
)
from resp_server.protocol.replies import OK, Frames, Reply, encode
from resp_server.session.session import RESP2
from resp_server.settings.server import REDIS_VERSION
from state_backend import VERSION

# A client's name, and its library's name and version (guess: Redis has no limit).
CLIENT_NAME_BYTES_MAX = 256
VERSION_OF_REDIS, OWN_VERSION = REDIS_VERSION.encode(), VERSION.encode()
RESET = Frames(encode("RESET", RESP2))
PRINTABLE = re.compile(rb"[!-~]*")


@command("ping")
def ping(context: CommandContext, message: bytes | None = None) -> Reply:
    """Returns the server's liveliness response."""
    if context.session.gets_messages_as_replies:
        return [b"pong", message or b""]
    return "PONG" if message is None else message


@command("echo")
def echo(context: CommandContext, message: bytes) -> bytes:
    """Returns the given string."""
    return message


@command("select")
def select(context: CommandContext, index: int) -> Reply:
    """Changes the selected database."""
    check_32_bits(index)
    if index and context.server.cluster is not None:
        raise GenericError("SELECT is not allowed in cluster mode")
    if not 0 <= index < context.server.config.databases:
        raise GenericError("DB index is out of range")
    context.session.select(index)
    return OK


@command("quit")
def quit_(context: CommandContext, *ignored: bytes) -> Reply:
    """Closes the connection."""
    context.session.close()
    return OK


@command("reset")
def reset(context: CommandContext) -> Reply:
    """Resets the connection."""
    session, server = context.session, context.server
    notifications = server.notifications
    may_be_known = notifications.classes_of_clients or notifications.too_slow
    if may_be_known or not session.is_as_new:
        server.leave(session)
        session.restart()
    return RESET


@command("auth")
def auth(context: CommandContext, first: bytes, *second: bytes) -> Reply:
    """Authenticates the connection."""
    if len(second) > 1:
        raise syntax_error()
    if not second and context.server.users.default.is_nopass:
        raise GenericError(
            "AUTH <password> called without any password configured for the default user. "
            "Are you sure your configuration is correct?"
        )
    user, password = (first, second[0]) if second else (DEFAULT_USER, first)
    _log_in(context, user, password, b"AUTH")
    return OK


def _log_in(context: CommandContext, name: bytes, password: bytes, command_name: bytes) -> None:
    """Authenticate the client; WrongPassError.

    Args:
        command_name: For ACL LOG.
    """
    user = context.server.users.log_in(name, password)
    if user is None:
        context.record_denial(Reason.AUTH, command_name, name)
        raise WrongPassError
    context.session.authenticate(user)


@command("hello")
def hello(context: CommandContext, *arguments: bytes) -> Reply:
    """Handshakes with the Redis server."""
    session = context.session
    protocol = _protocol(arguments[0]) if arguments else session.protocol
    credentials, name = _hello_options(arguments[1:])
    if credentials is not None:
        _log_in(context, *credentials, b"HELLO")
    if not session.is_authenticated:
        raise NoAuthError(
            "HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH <user> "
            "<pass> option can be used to authenticate the client and select the RESP protocol version at the same time"
        )
    if name is not None:
        session.name = name
    session.protocol = protocol
    server = context.server
    mode = b"standalone" if server.cluster is None else b"cluster"
    before, after = _hello_texts(server, protocol, mode, b"replica" if server.is_replica else b"master")
    return Frames(b"%b:%d\r\n%b" % (before, session.id, after))


def _hello_texts(server: ServerContext, protocol: int, mode: bytes, role: bytes) -> tuple[bytes, bytes]:
    """Return the reply to HELLO before and after the client's id. It is encoded once, until its other fields change."""
    fields, cached = server.reply_cache.hello.get((protocol, mode, role), (None, (b"", b"")))
    if fields is server.proxy.hello_fields:
        return cached
    reply: Reply = {
        b"server": b"redis",
        b"version": VERSION_OF_REDIS,
        b"proto": protocol,
        b"id": 0,
        b"mode": mode,
        b"role": role,
        b"modules": [],
        **server.proxy.hello_fields,
        b"sparkis_version": OWN_VERSION,  # clients look fields up by name, and ignore others
    }
    before, id_name, after = encode(reply, protocol).partition(b"\r\n$2\r\nid\r\n")
    texts = before + id_name, after.removeprefix(b":0\r\n")
    server.reply_cache.hello[protocol, mode, role] = server.proxy.hello_fields, texts
    return texts


def _protocol(argument: bytes) -> int:
    try:
        protocol = integer(argument)
    except ReplyError:
        raise GenericError("Protocol version is not an integer or out of range") from None
    if protocol not in (2, 3):
        raise NoProtoError
    return protocol


def _hello_options(arguments: tuple[bytes, ...]) -> tuple[tuple[bytes, bytes] | None, bytes | None]:
    """Return (user, password) of AUTH and the name of SETNAME; None for an option that is not given."""
    credentials = name = None
    at = 0
    while at < len(arguments):
        option, remaining = arguments[at].upper(), len(arguments) - at - 1
        if option == b"AUTH" and remaining >= 2:
            credentials = arguments[at + 1], arguments[at + 2]
            at += 3
        elif option == b"SETNAME" and remaining >= 1:
            name = client_name(arguments[at + 1])
            at += 2
        else:
            raise GenericError(f"Syntax error in HELLO option '{client_text(arguments[at])}'")
    return credentials, name


def client_name(argument: bytes) -> bytes:
    """Check a connection's name: printable, without spaces; GenericError."""
    check_length("a client's name", argument)
    if not _is_printable(argument):
        raise GenericError("Client names cannot contain spaces, newlines or special characters.")
    return argument


def check_length(name: str, argument: bytes) -> None:
    """Raise GenericError for a text that would make CLIENT LIST too long."""
    if len(argument) > CLIENT_NAME_BYTES_MAX:
        raise GenericError(f"{name} may have {CLIENT_NAME_BYTES_MAX} bytes; this one has {len(argument)}")


def _is_printable(argument: bytes) -> bool:
    return PRINTABLE.fullmatch(argument) is not None


def library_text(attribute: bytes, argument: bytes) -> bytes:
    """Check the name or version of a client library for CLIENT SETINFO; `attribute` is the option as typed."""
    check_length(client_text(attribute), argument)
    if not _is_printable(argument):
        raise GenericError(f"{client_text(attribute)} cannot contain spaces, newlines or special characters.")
    return argument
