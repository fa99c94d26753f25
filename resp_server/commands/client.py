"""CLIENT: what is known of the connections."""

from __future__ import annotations

from typing import Annotated

from resp_server.commands.connection import client_name, library_text
from resp_server.commands.spec import command, integer
from resp_server.errors import PlainError, ReplyError, syntax_error, typed
from resp_server.instance import Call
from resp_server.protocol.replies import OK, Reply, Verbatim
from resp_server.protocol.session import ReplyMode, Session

CLIENT_TYPES = (b"normal", b"master", b"replica", b"slave", b"pubsub")


def on_or_off(word: bytes) -> bool:
    """Read ON or OFF."""
    if word.upper() not in (b"ON", b"OFF"):
        raise syntax_error()
    return word.upper() == b"ON"


Switch = Annotated[bool, on_or_off]


@command("client|id")
def client_id(call: Call) -> int:
    """Returns the unique client ID of the connection."""
    return call.session.id


@command("client|getname")
def client_getname(call: Call) -> bytes | None:
    """Returns the name of the connection."""
    return call.session.name or None


@command("client|setname")
def client_setname(call: Call, name: Annotated[bytes, client_name]) -> Reply:
    """Sets the connection name."""
    call.session.name = name
    return OK


@command("client|setinfo")
def client_setinfo(call: Call, attribute: bytes, value: bytes) -> Reply:
    """Sets information specific to the client or connection."""
    match attribute.lower():
        case b"lib-name":
            call.session.lib_name = library_text(attribute, value)
        case b"lib-ver":
            call.session.lib_ver = library_text(attribute, value)
        case _:
            raise PlainError(f"Unrecognized option '{typed(attribute)}'")
    return OK


@command("client|no-evict")
def client_no_evict(call: Call, is_on: Switch) -> Reply:
    """Sets the client eviction mode of the connection."""
    call.session.is_no_evict = is_on
    return OK


@command("client|no-touch")
def client_no_touch(call: Call, is_on: Switch) -> Reply:
    """Controls whether commands sent by the client affect the LRU/LFU of accessed keys."""
    call.session.is_no_touch = is_on
    return OK


@command("client|reply")
def client_reply(call: Call, mode: bytes) -> Reply:
    """Instructs the server whether to reply to commands."""
    modes = {b"ON": ReplyMode.ON, b"OFF": ReplyMode.OFF, b"SKIP": ReplyMode.SKIP_NEXT}
    if mode.upper() not in modes:
        raise syntax_error()
    call.session.reply(modes[mode.upper()])
    return OK


@command("client|info")
def client_info(call: Call) -> Reply:
    """Returns information about the connection."""
    return Verbatim(client_line(call, call.session))


@command("client|list")
def client_list(call: Call, *options: bytes) -> Reply:
    """Lists open connections."""
    sessions = call.instance.sessions
    chosen = list(sessions.values())
    if options:
        option = options[0].upper()
        if option == b"TYPE" and len(options) == 2:
            chosen = _of_type(options[1], chosen)
        elif option == b"ID" and len(options) > 1:
            wanted = [_session_id(word) for word in options[1:]]
            chosen = [sessions[each] for each in wanted if each in sessions]
        else:
            raise syntax_error()
    return Verbatim(b"".join(client_line(call, each) for each in chosen))


def _of_type(word: bytes, sessions: list[Session]) -> list[Session]:
    if word.lower() not in CLIENT_TYPES:
        raise PlainError(f"Unknown client type '{typed(word)}'")
    return sessions if word.lower() == b"normal" else []


def _session_id(word: bytes) -> int:
    try:
        return integer(word)
    except ReplyError:
        raise PlainError("Invalid client ID") from None


def client_line(call: Call, session: Session) -> bytes:
    """Return a connection in the words of CLIENT LIST. What does not exist here (Redis' own buffers) is 0."""
    now_ms = call.now_ms
    flags = "e" * session.is_no_evict + "T" * session.is_no_touch or "N"
    output_bytes = call.instance.output_bytes(session.id)
    return (
        f"id={session.id} addr={session.address} laddr={session.local_address} fd=-1 "
        f"name={typed(session.name)} age={(now_ms - session.created_ms) // 1000} "
        f"idle={(now_ms - session.active_ms) // 1000} flags={flags} db={session.db} sub=0 psub=0 ssub=0 multi=-1 "
        f"watch=0 qbuf=0 qbuf-free=0 argv-mem=0 multi-mem=0 rbs=0 rbp=0 obl=0 oll=0 omem={output_bytes} "
        f"tot-mem={output_bytes} events=r cmd={session.last_command or 'NULL'} "
        f"user=default redir=-1 resp={session.protocol} "
        f"lib-name={typed(session.lib_name)} lib-ver={typed(session.lib_ver)}\n"
    ).encode("utf-8", "surrogateescape")


@command("client|help")
def client_help(call: Call) -> Reply:
    """Returns helpful text about the different subcommands."""
    return call.instance.table.help("client")
